"""What the fields of transformers configs mean, by name: the table behind `small_config`.

Model types name the same size differently (`hidden_size`, `n_embd`, `d_model`, …); a name that
means the same everywhere stands in one of the sets here. What a name means in one model type only
is in `special`.
"""

QUERY_HEADS = frozenset(
    {
        "attention_heads",
        "conf_num_attention_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "linear_num_heads",
        "linear_num_value_heads",
        "mamba_num_heads",
        "n_head",
        "n_heads",
        "num_attention_heads",
        "num_attention_heads_per_layer",
        "num_decoder_attention_heads",
        "num_encoder_attention_heads",
        "num_heads",
        "num_sliding_attention_heads",
        "resampler_heads",
        "resampler_n_heads",
        "speech_encoder_attention_heads",
        "swa_num_attention_heads",
        "t2u_decoder_attention_heads",
        "t2u_encoder_attention_heads",
    }
)
"""Numbers of query heads."""

KEY_VALUE_HEADS = {
    "kv_n_heads": ("n_heads",),
    "linear_num_key_heads": ("linear_num_value_heads",),
    "num_global_key_value_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_attention_heads", "n_heads", "num_heads"),
    "num_kv_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_attention_heads",),
    "swa_num_key_value_heads": ("swa_num_attention_heads", "num_attention_heads"),
}
"""Numbers of key/value heads, and the query heads that share them."""

HEAD_WIDTHS = frozenset(
    {
        "attention_head_dim",
        "attention_head_size",
        "d_head",
        "d_kv",
        "dim_head",
        "global_head_dim",
        "head_dim",
        "kv_channels",
        "linear_head_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "mamba_d_head",
        "mamba_head_dim",
        "mamba_headdim",
        "qk_nope_head_dim",
        "resampler_dim_head",
        "resampler_head_dim",
        "swa_head_dim",
        "swa_v_head_dim",
        "v_head_dim",
    }
)
"""Widths of one head."""

HIDDEN = frozenset(
    {
        "adapter_input_size",
        "adapter_out_dim",
        "attention_hidden_size",
        "audio_hidden_size",
        "backbone_hidden_size",
        "cross_attention_hidden_size",
        "d_model",
        "decoder_hidden_size",
        "emb_dim",
        "embed_dim",
        "embedding_dim",
        "embedding_size",
        "encoder_hidden_size",
        "hidden_dim",
        "hidden_size",
        "hidden_size_global",
        "image_text_hidden_size",
        "input_embedding_size",
        "lru_width",
        "n_embd",
        "out_hidden_size",
        "output_dim",
        "output_embedding_size",
        "patch_embed_hidden_size",
        "projection_dim",
        "projection_hidden_dim",
        "projection_hidden_size",
        "projector_hidden_size",
        "projector_input_dim",
        "projector_output_dim",
        "text_hidden_size",
        "vision_hidden_size",
        "vision_output_dim",
        "word_embed_proj_dim",
        "moe_hidden_size",
    }
)
"""Widths of the stream between layers; one width for all parts of a model, so that they fit."""

MIDDLE = frozenset(
    {
        "alignment_intermediate_size",
        "d_ff",
        "d_inner",
        "decoder_ffn_dim",
        "dense_intermediate_size",
        "dff",
        "dim_ff",
        "encoder_ffn_dim",
        "expert_ffn_hidden_size",
        "feed_forward_size",
        "ffn_dim",
        "ffn_hidden_size",
        "inner_dim",
        "intermediate_size",
        "intermediate_size_mlp",
        "mlp_dim",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "n_inner",
        "projection_intermediate_size",
        "share_expert_dim",
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "shared_intermediate_size",
        "speech_encoder_intermediate_size",
        "t2u_decoder_ffn_dim",
        "t2u_encoder_ffn_dim",
    }
)
"""Widths inside an MLP or an expert."""

LAYERS = frozenset(
    {
        "aligner_num_add_layers",
        "conf_num_hidden_layers",
        "decoder_layers",
        "depth",
        "encoder_layers",
        "layers",
        "n_layer",
        "n_layers",
        "num_blocks",
        "num_decoder_layers",
        "num_encoder_layers",
        "num_hidden_layers",
        "num_layers",
        "num_layers_per_stack",
        "resampler_depth",
        "speech_encoder_layers",
        "t2u_decoder_layers",
        "t2u_encoder_layers",
    }
)
"""Numbers of layers."""

AT_MOST = {
    # experts
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "zero_expert_num": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_k": 2,
    "moe_top_k": 2,
    "moe_topk": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "router_hidden_size": 16,
    # low ranks
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "o_lora_rank": 8,
    "o_groups": 2,
    "adapter_rank": 4,
    "laurel_rank": 4,
    "gated_norm_rank": 4,
    "hc_lowrank": 6,
    # sparse attention
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "index_kpool": 2,
    # state spaces and short convolutions
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "chunk_size": 4,
    "mamba_chunk_size": 4,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "n_groups": 1,
    # windows
    "attention_chunk_size": 4,
    "attention_window": 4,
    "attention_window_size": 4,
    "keep_window_size": 4,
    "local_attention": 4,
    "local_attention_window_len": 4,
    "local_radius": 3,
    "global_block_size": 4,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "floor_scale": 4,
    "log_scaling_n_floor": 4,
    # positions
    "max_2d_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
    "max_encoder_position_embeddings": 64,
    "max_position_embeddings": 64,
    "max_pos_emb": 64,
    "max_seq_len": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "model_max_length": 64,
    "n_ctx": 64,
    "n_positions": 64,
    "context_length": 64,
    "original_max_position_embeddings": 32,
    "relative_attention_max_distance": 16,
    "relative_attention_num_buckets": 8,
    "rel_extent": 16,
    "t2u_max_position_embeddings": 64,
    # vocabularies beside the main one
    "vocab_size_per_layer_input": 131,
    "audio_vocab_size": 67,
    "char_vocab_size": 67,
    "hidden_size_per_layer_input": 6,
    # pictures
    "mm_tokens_per_image": 4,
    "num_query_tokens": 4,
    "latent_query_num": 4,
    "resampler_n_latents": 4,
    "resampler_num_latents": 4,
    "num_global_layers": 1,
    "max_num_tiles": 2,
    "downsample_hidden_size": 16,
    "max_img_size": 64,
    "nemo_conv_channels": 16,
    "num_lstm_layers": 1,
    "num_filters": 4,
    "codebook_size": 32,
    "codebook_dim": 8,
}
"""Other sizes, and what is enough of them."""

TIED_TO_MAIN_VOCABULARY = frozenset(
    {
        "decoder_vocab_size",
        "src_vocab_size",
        "tgt_vocab_size",
        "vocab_size",
        "t2u_vocab_size",
        "vocab_size_per_layer_input",
        "unpadded_vocab_size",
    }
)
"""Fields that become the small vocabulary."""

VOCABULARY = 131
"""Tokens of the small vocabulary: a prime, so that it divides over no number of ranks."""
