"""A causal Transformer language model, whose attention weights are its largest activations."""

from __future__ import annotations

from typing import Any


def transformer(
    layers: int = 12,
    width: int = 128,
    *,
    heads: int = 4,
    tokens: int = 128,
    vocabulary: int = 1000,
    dropout: float = 0.0,
    seed: int = 0,
) -> Any:
    """Return a decoder-only Transformer (Vaswani et al. 2017) with layer normalization first.

    Args:
        layers: blocks of causal self-attention and a feed-forward network four times as wide.
        width: features per token.
        heads: attention heads; they divide ``width``.
        tokens: length of a text.
        vocabulary: number of different tokens, of the input and of the prediction.
        dropout: share of features dropped after attention and feed-forward network.
        seed: of weights and dropout masks.
    """
    import keras

    keras.utils.set_random_seed(seed)
    layer = keras.layers
    inputs = keras.Input([tokens], dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    words = layer.Embedding(vocabulary, width)(inputs)
    x = layer.Add()([words, layer.Embedding(tokens, width)(places)])
    for _ in range(layers):
        y = layer.LayerNormalization()(x)
        attention = layer.MultiHeadAttention(heads, width // heads)
        y = attention(y, y, use_causal_mask=True)
        x = layer.Add()([x, layer.Dropout(dropout)(y) if dropout else y])
        y = layer.LayerNormalization()(x)
        y = layer.Dense(4 * width, activation="gelu")(y)
        y = layer.Dense(width)(y)
        x = layer.Add()([x, layer.Dropout(dropout)(y) if dropout else y])
    x = layer.LayerNormalization()(x)
    return keras.Model(inputs, layer.Dense(vocabulary)(x), name="transformer")
