"""Programs that start with torch and transformers loaded: `python`, `plait` and `torchrun`.

Importing torch and transformers takes seconds of processor time, and the pages start about a
hundred processes. Here one process has imported them, and forks each of those: a command of these
names is a small client that hands its arguments, folder, environment and open files to that
process, forwards signals, and ends as the fork does. plait itself is not loaded before: each fork
imports it anew, as a page's reader does. Workers of torchrun, and ranks that plait starts, come
from here as well, because in a fork `sys.executable` is the client. The README's page is run
without all this.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("python", "plait", "torchrun")
LARGEST = 1 << 20

CLIENT = """\
    #!{python} -IS
    import json, os, signal, socket, sys

    server = socket.socket(socket.AF_UNIX)
    server.connect({address!r})
    asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    server.sendall(len(asked).to_bytes(8, "big"))
    socket.send_fds(server, [b"f"], [0, 1, 2])
    server.sendall(asked)

    def forward(number, frame):
        server.sendall(bytes([number]))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, forward)
    answer = b""
    while len(answer) < 4 and (part := server.recv(4)):
        answer += part
    code = int.from_bytes(answer, "big", signed=True) if answer else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)
    """


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Path]:
    """Starts the process that forks; gives the directory to put first in `PATH`."""
    address = str(folder / "socket")
    (folder / "bin").mkdir()
    for name in NAMES:
        file = folder / "bin" / name
        text = CLIENT.format(python=sys.executable, address=address, name=name)
        file.write_text(textwrap.dedent(text))
        file.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.warm", address, str(folder / "bin" / "python")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder / "bin"
    finally:
        server.kill()
        server.communicate()


def serve(address: str, executable: str) -> None:
    """Forks a keeper for every client."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        os.write(1, b"ready\n")
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                keep(client, executable)
                os._exit(0)
            client.close()


def keep(client: socket.socket, executable: str) -> None:
    """Runs what the client asks for in a fork, until one of the two ends."""
    size = int.from_bytes(_received(client, 8), "big")
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    name, words, folder, environment = json.loads(_received(client, size))
    worker = os.fork()
    if worker == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.executable = executable
        run(name, words)
    for file in files:
        os.close(file)
    ends = os.pidfd_open(worker)
    while True:
        ready, _, _ = select.select([client, ends], [], [])
        if ends in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            with contextlib.suppress(OSError):
                client.sendall(code.to_bytes(4, "big", signed=True))
            return
        numbers = client.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(worker, number)
        if not numbers:
            return


def _received(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            os._exit(1)
        data += part
    return data


def run(name: str, words: list[str]) -> None:
    """Does what `name words…` does, and ends this process."""
    import atexit
    import random
    import runpy
    import threading
    import traceback

    random.seed()
    code = 0
    try:
        while words[:1] == ["-u"]:
            del words[0]
        if name == "plait":
            words = ["-m", "plait", *words]
        elif name == "torchrun":
            words = ["-m", "torch.distributed.run", *words]
        kind = words[0] if words else "-"
        if kind == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = [name, *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path[0] = ""
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        elif kind.startswith("-"):
            os.execv(REAL, [REAL, *words])
        else:
            sys.path[0] = str(Path(kind).resolve().parent)
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


REAL = sys.executable

if __name__ == "__main__":
    import importlib

    third_party = importlib.import_module("plait.testing.preload")
    for loaded in [name for name in sys.modules if name.partition(".")[0] in ("plait", "tests")]:
        del sys.modules[loaded]  # every fork imports plait for itself
    serve(sys.argv[1], sys.argv[2])
