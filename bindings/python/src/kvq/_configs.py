"""The layers of a model of transformers, from its config: what kvq.transformers.Cache.for_model makes a cache for."""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

from ._errors import UnsupportedError
from ._layers import Layer, StatePart, chunked_attention, full_attention, latent_attention, shared_with, sliding_attention, state_layer

ROLLBACK = 32  # tokens, of layers with windows unless given: more than drafts have
_FULL = ("full_attention", "attention")
_STATES = ("linear_attention", "conv", "mamba")
_WITHOUT = ("moe", "mlp")  # layers that keep nothing


def text_config(config: Any) -> Any:
    """The part of the config of a model for images and text that describes its decoder."""
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def layers_of(config: Any) -> List[Optional[Layer]]:
    """One entry per layer of the model; None for layers that keep nothing. UnsupportedError names the type of the model and
    what no cache holds."""
    of = text_config(config)
    _check(of)
    types = _types(of)
    owners = len(types) - (getattr(of, "num_kv_shared_layers", None) or 0)
    layers = [_layer(of, i, kind) for i, kind in enumerate(types[:owners])]
    layers += [_shared(of, kind, types[:owners]) for kind in types[owners:]]
    if all(layer is None or layer.parts for layer in layers):
        raise _refuse(of, "no layers with keys and values")
    return layers


def _refuse(of: Any, what: str) -> UnsupportedError:
    name = getattr(of, "model_type", None) or type(of).__name__
    return UnsupportedError(f"kvq: a model of the type {name} has {what}")


def _size(of: Any, name: str) -> int:
    value = getattr(of, name, None)
    if not isinstance(value, int):
        raise _refuse(of, f"{name} {value} in its config, not a number")
    return value


def _check(of: Any) -> None:
    if getattr(of, "relative_attention_num_buckets", None):
        raise _refuse(of, "learned biases that are added to scores (relative_attention_num_buckets), which kvq does not take")
    if getattr(of, "cross_attention_layers", None):
        raise _refuse(of, "layers that attend to images (cross_attention_layers), which kvq.transformers.Cache does not hold")
    states = getattr(of, "number_of_conv_states", None) or 1
    if states > 1:
        raise _refuse(of, f"layers with {states} convolution states each, kvq.transformers.Cache holds one")


def _types(of: Any) -> List[str]:
    """The type of every layer. Without a list all are of one type."""
    for name in ("layer_types", "layers_block_type"):
        types = getattr(of, name, None)
        if types:
            return list(types)
    one = "full_attention"
    if getattr(of, "sliding_window", None) is not None:
        one = "sliding_attention"
    elif getattr(of, "attention_chunk_size", None) is not None:
        one = "chunked_attention"
    return [one] * _size(of, "num_hidden_layers")


def _layer(of: Any, i: int, kind: str) -> Optional[Layer]:
    if kind in _WITHOUT:
        return None
    if kind in _STATES:
        return state_layer(_parts(of, kind))
    if kind in _FULL and getattr(of, "kv_lora_rank", None):
        return latent_attention(_size(of, "kv_lora_rank"), _size(of, "qk_rope_head_dim"))
    shape = _shape(of, i)
    if kind in _FULL:
        return full_attention(*shape)
    if kind == "sliding_attention" and getattr(of, "sliding_window", None):
        return sliding_attention(of.sliding_window, *shape)
    if kind == "chunked_attention" and getattr(of, "attention_chunk_size", None):
        return chunked_attention(of.attention_chunk_size, *shape)
    raise _refuse(of, f"layers of the type {kind}, which kvq.transformers.Cache does not hold")


def _shared(of: Any, kind: str, owners: List[str]) -> Layer:
    """Reads the keys and values of the last layer of its type that has its own."""
    if kind not in owners or any(owner in _WITHOUT for owner in owners):
        raise _refuse(of, f"a layer of the type {kind} with the keys of an earlier one (num_kv_shared_layers), among layers of the "
                          f"types {', '.join(sorted(set(owners)))}")
    return shared_with(len(owners) - 1 - owners[::-1].index(kind))


def _shape(of: Any, i: int) -> Tuple[int, int, int]:
    """Heads of keys and values, channels of a key, channels of a value."""
    c = of.per_layer_config[i] if getattr(of, "is_heterogeneous", False) else of
    heads = _size(c, "num_attention_heads")
    if getattr(c, "kv_lora_rank", None):  # latent attention, expanded
        return heads, _size(c, "qk_nope_head_dim") + _size(c, "qk_rope_head_dim"), _size(c, "v_head_dim")
    dim = getattr(c, "head_dim", None) or _size(c, "hidden_size") // heads
    return getattr(c, "num_key_value_heads", None) or heads, dim, dim


def _parts(of: Any, kind: str) -> Tuple[StatePart, ...]:
    """What a layer with state keeps: the last inputs of its convolution, and its recurrent state."""

    def has(*names: str) -> bool:
        return all(getattr(of, name, None) for name in names)

    if has("linear_num_value_heads", "linear_num_key_heads"):  # Gated DeltaNet
        heads, d, dv = of.linear_num_value_heads, of.linear_key_head_dim, of.linear_value_head_dim
        channels, inputs = 2 * of.linear_num_key_heads * d + heads * dv, of.linear_conv_kernel_dim
        state = (heads, d, dv)
    elif has("mamba_num_heads", "ssm_state_size"):  # Mamba 2, Nemotron H
        channels = of.mamba_num_heads * of.mamba_head_dim + 2 * of.n_groups * of.ssm_state_size
        inputs, state = of.conv_kernel, (of.mamba_num_heads, of.mamba_head_dim, of.ssm_state_size)
    elif has("mamba_n_heads", "mamba_d_state"):  # Mamba 2
        width = of.mamba_expand * of.hidden_size
        channels, inputs = width + 2 * of.mamba_n_groups * of.mamba_d_state, of.mamba_d_conv
        state = (of.mamba_n_heads, width // of.mamba_n_heads, of.mamba_d_state)
    elif has("mamba_d_state", "mamba_d_conv"):  # Mamba
        channels, inputs = of.mamba_expand * of.hidden_size, of.mamba_d_conv
        state = (1, channels, of.mamba_d_state)
    elif kind == "conv" and has("conv_L_cache"):  # a convolution alone
        return (StatePart("conv", "float32", 1, of.hidden_size, of.conv_L_cache),)
    else:
        raise _refuse(of, f"layers of the type {kind}, the sizes of whose state kvq does not know")
    return StatePart("conv", "float32", 1, channels, inputs), StatePart("recurrent", "float32", *state)
