"""What the consistency guard costs: a forward with and without it, and one look at all weights.

    python benchmarks/guard_cost.py

Two gloo ranks on this machine, a random Llama of 16 layers x 64. The table in docs/how-to/guard.md.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time


def median_ms(work, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[rounds // 6 :])


def on_each_rank(rounds: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import plait

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = plait.parallelize(LlamaForCausalLM(config), plait.DistributedConfig(tp_size=2))
    ids = torch.ones(1, 1, dtype=torch.long)
    large = {"inputs_embeds": torch.ones(1, 1, 64), "pixels": torch.ones(25_000_000)}  # 100 MB
    with torch.no_grad():
        plain = median_ms(lambda: model(input_ids=ids), rounds)
        guard = plait.guard(model, weights_every=0)
        guarded = median_ms(lambda: model(input_ids=ids), rounds)
        calls = median_ms(lambda: guard.before_forward((), {"input_ids": ids}), rounds)
        weights = median_ms(guard.check_weights, rounds)
        arguments = median_ms(lambda: guard.before_forward((), large), rounds)
        guard.off()
    if torch.distributed.get_rank() == 0:
        print(f"forward {plain:.2f} ms, with the guard {guarded:.2f} ms")
        print(f"the look at a forward with token ids   {calls:8.2f} ms")
        print(f"all whole weights (33 norms)           {weights:8.2f} ms")
        print(f"100 MB of embeddings or pixels         {arguments:8.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="times each figure is taken")
    options = parser.parse_args()
    if "RANK" in os.environ:
        on_each_rank(options.rounds)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks = [*torchrun, "--nproc-per-node", "2", __file__, *sys.argv[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run(ranks, env=environment, check=False).returncode)
