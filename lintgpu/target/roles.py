"""What an integer of a model is for, guessed from its name: a config key, a variable, a keyword or a flag."""

from __future__ import annotations

import re

_ROLES = {
    "vocabulary": r"(padded_|n_|num_)?vocab(ulary)?(_size)?(_or_config_json_file)?|num_embeddings|n_?tokens|embedding_size",
    "kv-heads": r"(num_|n_)?(key_value|kv)_?heads?(_num)?|n_head_kv|num_kv|multi_query_group_num|n_query_groups",
    "head-dim": r"(attention_|attn_|qk_nope_|qk_rope_|qk_|v_)?head_(dim|size|width)|d_(kv|head|k|v)|kv_channels|key_size|dim_head",
    "heads": r"(encoder_|decoder_|num_|n_)?(attention_|attn_)?heads?|num_attn_heads|(num_|n_)(q|query)_heads|nhead",
    "experts": r"(num_|n_)?(local_|routed_|moe_)*experts|moe_num_experts",
    "layers": r"(num_|n_)?(hidden_|encoder_|decoder_|transformer_)*(layers?|blocks|depth)(_num)?",
    "positions": r"max_(position_embeddings|seq_?(uence_)?len(gth)?|(source_|target_)?positions)|n_(positions|ctx)|block_size"
    r"|context_(length|size)|seq_?(uence_)?len(gth)?",
    "feed-forward": r"(moe_|shared_expert_|dense_)?intermediate_(size|dim)|(moe_)?ffn?(_hidden)?_(dim|size)|d_?(ff|mlp|inner)"
    r"|dim_?(feed_?forward|ff|mlp)|ffn?_?hidden(_size|_dim)?|mlp_(dim|hidden_dim|hidden_size|size|width)|n_inner"
    r"|(hidden|inner)_features|ff_?dim|feed_?forward(_dim|_size)?|inner_(dim|size)|expert_(dim|size)",
    "hidden": r"hidden_(size|dim)|n_embe?d|(d|dim)_model|model_(dim|width|size)|d_?embed|embed(ding)?_dim|emb_(dim|size)|dim|width"
    r"|channels|word_embed_proj_dim",
}
# A prefix such as encoder_ or text_ changes no role but hidden's: mlp_dim is no hidden size.
_PATTERNS = {role: re.compile(pattern if role == "hidden" else rf"(?:.*_)?(?:{pattern})") for role, pattern in _ROLES.items()}


def role_of(name: str) -> str:
    """vocabulary, hidden, feed-forward, heads, kv-heads, head-dim, layers, positions, experts or '' (unknown).

    `name` may be a dotted key path or a flag; only its last part counts, case and dashes do not.
    """
    last = name.rsplit(".", 1)[-1].lstrip("-").replace("-", "_").lower()
    return next((role for role, pattern in _PATTERNS.items() if pattern.fullmatch(last)), "")
