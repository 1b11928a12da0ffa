"""What parts of models are called: the tables that `derive` looks into.

Everything here is knowledge about names and classes; what a table says is only ever a proposal that
the shapes have to agree with, and that the numeric check proves before first use.
"""

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


QUERY = _words(
    """
    q_proj query q q_lin q_linear query_proj to_q linear_q wq Wq q_attn queries query_layer Q
    projection_query project_q q_head w_q W_q W_Q qkv_q
    """
)
KEY = _words(
    """
    k_proj key k k_lin k_linear key_proj to_k linear_k wk Wk keys key_layer K projection_key
    project_k k_head w_k W_k W_K
    """
)
VALUE = _words(
    """
    v_proj value v v_lin v_linear value_proj to_v linear_v wv Wv values value_layer V
    projection_value project_v v_head w_v W_v W_V
    """
)
OUTPUT = _words(
    """
    o_proj out_proj dense out_lin c_proj o wo Wo to_out proj projection out output linear_out
    output_proj out_linear attention_out post_proj O w_o W_o W_O projection_layer resid_proj
    post final_linear
    """
)
"""The projections of an attention; `output` counts inside an attention only."""

GATE = _words("g_proj gate_proj output_gate gate gate_linear")
"""Gates on the output of an attention: one per feature or one per head."""

PER_HEAD_EXTRA = _words(
    """
    relative_k_proj linear_pos pos_proj relative_key_proj r_proj sink_proj w2e_query e2w_query
    e2e_query
    """
)
"""Further projections of an attention with features for every query head."""

FUSED = _words(
    """
    c_attn query_key_value qkv_proj qkv Wqkv wqkv W_pack att_proj qkv_linear to_qkv in_proj
    in_proj_qkv attn_qkv fused_qkv qkv_layer linear_qkv
    """
)
FUSED_KV = _words("kv_proj to_kv kv Wkv wkv key_value linear_kv")

MLA_QUERY = _words("q_b_proj q_up_proj wq_b q_gate_proj")
MLA_QUERY_DOWN = _words("q_a_proj q_down_proj wq_a")
MLA_KV_DOWN = _words("kv_a_proj_with_mqa")
MLA_KV = _words("kv_b_proj kv_up_proj")

PER_HEAD_CLASSES = _words(
    """
    BloomAttention GPTNeoXAttention GPTNeoXJapaneseAttention PersimmonAttention
    MegatronAttention RWAttention
    """
)
"""Attention classes whose fused weight is `[head: q | k | v]`."""

PER_GROUP_NAMES = _words("wqkv")
"""Names of fused weights that are `[key/value head: its queries | k | v]` (InternLM2)."""

OTHER_LAYOUTS = {
    "CodeGenAttention": "its fused weight consists of four blocks [q | v | k]",
    "LayoutLMv2SelfAttention": "biases of its own are added to the fused projection",
}
"""Attention classes whose heads lie in an order of their own."""

READS_WEIGHTS = {
    "DisentangledSelfAttention": "it reads the weight of its projection itself",
    "MultiheadAttention": "torch's own attention reads the weights of its projections itself",
    "DeepseekV4Attention": "its output projection works group by group on its own weight",
    "DetrMHAttentionMap": "it reads the weight of its projection itself",
    "ConditionalDetrMHAttentionMap": "it reads the weight of its projection itself",
}
"""Classes that use a weight without calling its module: nothing of theirs can be cut."""

EMBEDDING_READERS = _words(
    """
    IdeficsModel Qwen4ExpTextNGramEmbedding
    """
)
"""Classes that count the rows of an embedding themselves."""

HEAD_READERS = _words("Gemma4AssistantForCausalLM Gemma4UnifiedAssistantForCausalLM")
"""Classes that use the weight of the head without calling it."""

INPUT_NORMS = _words("BltCrossAttention")
"""Attention classes whose `q_norm`, `k_norm` come before the projections, not after."""

STATISTICS = _words("Gemma3nTextMLP")
"""Classes whose own code takes a mean or a deviation over the width of the MLP."""

PARTS = re.compile(r"Attention(?!.*Map)|CCAProjection|Attn$")
"""Classes of attention, or of parts of one."""

WHOLE_HEADS = re.compile(
    r"BlockSparse|GlobalLocal|Longformer|LEDEncoderSelfAttention|LSHSelf|LocalSelf|Nystrom|Yoso|Mra|"
    r"ProphetNetNgram|Swin|ClapAudioSelf|BeitSelf|Data2VecVisionSelf|Funnel|Reformer|LightningA|"
    r"LongT5Local|LongT5TransientGlobal|ConvBertSelf|Informer|Autoformer|"
    r"EfficientAdditive|ChannelAttention|Disentangled|DiffLlama|Deformable|CrossAttentionMultihead|BiMultiHead"
)
"""Attention whose code mixes heads or counts in ways that local heads do not fit."""

INPUT_WIDTH = re.compile(
    r"^(Aimv2AttentionPoolingHead|(Instruct)?Blip(2|Video)?Attention|GroupViTAttention|"
    r"LEDDecoderAttention|Mask2FormerAttention|OneFormerAttention|MgpstrAttention|PPOCR.*Attention|"
    r"ProphetNetAttention|TimesformerSelfAttention|TrOCRAttention|PvtV2SelfAttention|"
    r"Florence2VisionWindowAttention|TableTransformerAttention|DetrAttention|FSMT Attention)$"
)
"""Attention whose code gives its result the width of its input, where local heads are narrower."""

MIXERS = re.compile(
    r"Mixer$|MambaLayer|Rwkv(Self)?Attention|RwkvFeedForward|RecurrentBlock|DeltaNet|"
    r"DeltaAttention|LinearAttention|xLSTMLayer|ShortConv|LightningAttention"
)
"""Blocks that mix tokens by a recurrence or a convolution."""

MIXER_IN = _words(
    """
    in_proj linear_x linear_y key value receptance q k v ogate_preact in_proj_qkvz in_proj_ba
    in_proj_a in_proj_b in_proj_qkv
    in_proj_z qkv_proj output_gate q_proj k_proj v_proj g_proj
    """
)
MIXER_OUT = _words("linear_out output out_proj o_proj")
"""Linear layers of mixers that are only called: cut, and gathered around."""

KERNEL_READS = re.compile(r"Mamba|FalconH1|Bamba|Jamba|NemotronH")
"""Mixers whose fused kernels read the weight of the output projection."""

PAIRS = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"),
    ("fc_in", "fc_out"),
    ("linear1", "linear2"),
    ("linear_1", "linear_2"),
    ("up_proj", "down_proj"),
    ("wi", "wo"),
    ("Wi", "Wo"),
    ("w_in", "w_out"),
    ("intermediate_dense", "output_dense"),
    ("intermediate", "output"),
    ("dense1", "dense2"),
    ("linear_fc1", "linear_fc2"),
    ("ffn", "ffn_output"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("layer_1", "layer_2"),
    ("layer1", "layer2"),
    ("w12", "w3"),
    ("w1", "w2"),
    ("dense_0", "dense_1"),
    ("ffw_layer_1", "ffw_layer_2"),
    ("linear_in", "linear_out"),
    ("lin_1", "lin_2"),
    ("ff1", "ff2"),
    ("up", "down"),
    ("proj_up", "proj_down"),
    ("img_projection_up", "img_projection_down"),
    ("fc", "proj"),
    ("pwconv1", "pwconv2"),
    ("merge_linear_1", "merge_linear_2"),
    ("in_proj", "out_proj"),
)
"""First and last layer of an MLP."""

GATED = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("proj_up_gate", "proj_up", "proj_down"),
    ("fc1_g", "fc1_x", "fc2"),
    ("gate", "up", "down"),
    ("linear_v", "linear_1", "linear"),
    ("c_fc_0", "c_fc_1", "c_proj"),
    ("w1", "v1", "w2"),
    ("w1", "w2", "c_proj"),
    ("w_0", "w_1", "w_out"),
)
"""Gate, up and down of a gated MLP."""

MLP_CLASS = re.compile(r"mlp|ffn|feed_?forward|ffw|expert|adapter|projector|merger|glu", re.I)
"""Classes that are an MLP whatever their layers are called."""

NOT_MLP = re.compile(r"router|(^|\s)gate$|classif|pooler|downsample", re.I)
"""Classes and names whose small layers decide rather than compute."""

POSITIONS = re.compile(
    r"pos(ition|itional)?(_|$)|_pos|wpe|position|token_type|segment|(^|_)type|turn_?type|lang_emb|"
    r"relative|distance|rel_|query_embed|query_refpoint|level_embed|task|class_embed|mask_token|"
    r"_tokens?$|^tokens?$|box|temporal|row_embed|column_embed|not_a_point|point_embed",
    re.I,
)
"""Names of embeddings of positions, types and other small tables; `TOKENS` comes first."""

TOKENS = _words(
    """
    embed_tokens wte word_embeddings word_embedding tok_embeddings embed_in shared
    tokens_embed embeddings input_embedding token_embedding tok_embedding text_embed w emb
    embed embedding embeds encoder_hash_tok_embedding wordEmbed token_emb tok_emb
    """
)
HEAD_PARTS = re.compile(r"PredictionHead|LMHead|GeneratorPredictions|HeadTransform|LMPrediction")
"""Classes of what comes before the last layer of a head."""

HEADS = _words(
    """
    lm_head lm_heads embed_out decoder head output generator_lm_head lm_loss proj_out
    output_projection proj unembed to_logits logits codebooks_head audio_lm_head
    vocab_projector final_proj
    """
)
