"""Models of frameworks and of libraries of models."""

import dataclasses
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.ecosystem._programs import Made, Numbers, Registry, cross_entropy, next_token

FRAMEWORKS = Registry()
_TOKENS = 64


@FRAMEWORKS.add("dm-haiku", "haiku")
def haiku_resnet() -> Made:
    hk, numbers = import_module("haiku"), Numbers()

    def network(x: jax.Array) -> Any:
        return hk.nets.ResNet(
            [1, 1, 1, 1], 10, bottleneck=True, channels_per_group=(16, 32, 64, 64)
        )(x, True)

    made = hk.transform_with_state(network)
    x = numbers.normal(8, 32, 32, 3)
    params, state = numbers.initialized(made.init, jax.random.PRNGKey(0), x)

    def loss(params: Any, state: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(made.apply(params, state, None, x)[0], labels)

    return loss, params, (state, x, numbers.integers(10, 8))


@FRAMEWORKS.add("dm-haiku", "haiku")
def haiku_lstm() -> Made:
    hk, numbers = import_module("haiku"), Numbers()

    def network(x: jax.Array) -> Any:
        core = hk.DeepRNN([hk.LSTM(16), jax.nn.relu, hk.LSTM(16)])
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(30))(outputs)

    made = hk.without_apply_rng(hk.transform(network))
    x = numbers.normal(10, 4, 8)
    params = numbers.initialized(made.init, jax.random.PRNGKey(0), x)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(made.apply(params, x), labels)

    return loss, params, (x, numbers.integers(30, 10, 4))


@FRAMEWORKS.add(
    "flax",
    note="has most of its error in the gradient of the tied embedding. On CPUs, XLA adds up in "
    "bfloat16 where the result of a bfloat16 product is transposed: the error of "
    "`jax.jit(lambda a, b: (a @ b).T)` grows with the length of the sums, and that of `a @ b` "
    "does not",
)
def linen_scan_of_remat() -> Made:
    nn, numbers = import_module("flax.linen"), Numbers()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> Any:
            hidden = nn.LayerNorm()(x)
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + nn.MultiHeadDotProductAttention(4)(hidden, hidden, mask=mask)
            hidden = nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))
            return x + nn.Dense(32)(hidden), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> Any:
            embed = nn.Embed(50, 32)
            kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            blocks = nn.scan(
                nn.remat(Block, prevent_cse=False, policy=kept),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                in_axes=nn.broadcast,
            )
            x, _ = blocks()(embed(tokens), None)
            return embed.attend(nn.LayerNorm()(x))

    model, tokens = Model(), numbers.integers(50, 4, 13)
    params = numbers.initialized(model.init, jax.random.PRNGKey(0), tokens)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return next_token(model.apply(params, tokens), tokens)

    return loss, params, (tokens,)


def _nnx(numbers: Numbers, make: Callable[[], Any], loss: Callable[..., Any], *data: Any) -> Made:
    """An NNX model as a function of its parameters."""
    nnx = import_module("flax.nnx")
    graph, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def constant(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        fill = np.ones if jnp.issubdtype(leaf.dtype, jnp.floating) else np.zeros
        return fill(leaf.shape, leaf.dtype)

    def merged(params: Any, rest: Any, *data: Any) -> Any:
        return loss(nnx.merge(graph, params, rest, copy=True), *data)

    return merged, numbers.filled(params), (jax.tree.map(constant, rest), *data)


def _nnx_tokens(numbers: Numbers, make: Callable[[], Any]) -> Made:
    """An NNX language model."""

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return next_token(model(tokens), tokens)

    return _nnx(numbers, make, loss, numbers.integers(50, 4, 13))


def _nnx_block(nnx: Any, drop: float) -> Any:
    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = nnx.LayerNorm(32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                4, 32, decode=False, dropout_rate=drop, rngs=rngs, keep_rngs=bool(drop)
            )
            self.wide, self.narrow = (
                nnx.Linear(32, 64, rngs=rngs),
                nnx.Linear(64, 32, rngs=rngs),
            )
            self.drop = nnx.Dropout(drop, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.drop(self.attention(self.first(x), mask=mask, deterministic=False))
            return x + self.drop(self.narrow(nnx.gelu(self.wide(self.second(x)))))

    return Block


@FRAMEWORKS.add("flax")
def nnx_transformer_with_dropout_and_batch_norm() -> Made:
    nnx, numbers = import_module("flax.nnx"), Numbers()
    block = _nnx_block(nnx, 0.1)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(50, 32, rngs=rngs)
            self.blocks = nnx.List([block(rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(32, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for one in self.blocks:
                x = one(x)
            return self.embed.attend(self.norm(x))

    return _nnx_tokens(numbers, lambda: Model(nnx.Rngs(0)))


@FRAMEWORKS.add("flax")
def nnx_scan_of_remat() -> Made:
    nnx, numbers = import_module("flax.nnx"), Numbers()
    block = _nnx_block(nnx, 0.0)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(50, 32, rngs=rngs)

            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stacked(rngs: Any) -> Any:
                return block(rngs)

            self.blocks = stacked(rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def layer(x: jax.Array, one: Any) -> jax.Array:
                return one(x)

            return self.embed.attend(layer(self.embed(tokens), self.blocks))

    return _nnx_tokens(numbers, lambda: Model(nnx.Rngs(0)))


@FRAMEWORKS.add("flax")
def nnx_lstm_and_bidirectional_gru() -> Made:
    nnx, numbers = import_module("flax.nnx"), Numbers()

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.RNN(nnx.OptimizedLSTMCell(8, 16, rngs=rngs))
            self.second = nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs)), nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs))
            )
            self.out = nnx.Linear(32, 5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.second(self.first(x)).mean(1))

    return _nnx(
        numbers,
        lambda: Model(nnx.Rngs(0)),
        lambda model, x, labels: cross_entropy(model(x), labels),
        numbers.normal(4, 10, 8),
        numbers.integers(5, 4),
    )


def _keras(numbers: Numbers, model: Any, loss: Callable[[Any, Any], Any], *data: Any) -> Made:
    """A Keras model as a function of its parameters; the first of the data is its input."""
    params = numbers.filled(
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in model.trainable_variables]
    )
    state = [np.asarray(variable.value) for variable in model.non_trainable_variables]

    def stateless(params: Any, state: Any, x: Any, labels: Any) -> Any:
        return loss(model.stateless_call(params, state, x, training=True)[0], labels)

    return stateless, params, (state, *data)


@FRAMEWORKS.add("keras")
def keras_transformer() -> Made:
    keras, numbers = import_module("keras"), Numbers()
    layers = keras.layers
    tokens = keras.Input((12,), dtype="int32")
    hidden = layers.Embedding(50, 32)(tokens)
    normed = layers.LayerNormalization()(hidden)
    hidden += layers.MultiHeadAttention(4, 8)(normed, normed, use_causal_mask=True)
    wide = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(hidden))
    model = keras.Model(tokens, layers.Dense(50)(hidden + layers.Dense(32)(wide)))
    text = numbers.integers(50, 4, 13)
    return _keras(numbers, model, cross_entropy, text[:, :-1], text[:, 1:])


@FRAMEWORKS.add("keras")
def keras_lstm_and_gru() -> Made:
    keras, numbers = import_module("keras"), Numbers()
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((12, 8)),
            layers.LSTM(16, return_sequences=True),
            layers.Bidirectional(layers.GRU(16)),
            layers.Dense(1),
        ]
    )

    def loss(made: Any, labels: Any) -> Any:
        return keras.ops.mean((made[:, 0] - labels) ** 2)

    return _keras(numbers, model, loss, numbers.normal(4, 12, 8), numbers.normal(4))


@FRAMEWORKS.add("keras")
def keras_mobilenet() -> Made:
    keras, numbers = import_module("keras"), Numbers()
    model = keras.applications.MobileNet(
        input_shape=(32, 32, 3),
        alpha=0.25,
        weights=None,
        classes=10,
        classifier_activation=None,
    )
    data = numbers.normal(4, 32, 32, 3), numbers.integers(10, 4)
    return _keras(numbers, model, cross_entropy, *data)


@FRAMEWORKS.add("equimo")
def equimo_vision_transformer() -> Made:
    models, numbers = import_module("equimo.vision.models"), Numbers()
    model = models.VisionTransformer(
        img_size=16,
        in_channels=3,
        dim=32,
        patch_size=4,
        num_heads=[4],
        depths=[2],
        num_classes=10,
        key=jax.random.PRNGKey(0),
    )

    def loss(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        def one(image: jax.Array) -> Any:
            return model(image, key=jax.random.PRNGKey(1), inference=True)

        return cross_entropy(jax.vmap(one)(images), labels)

    return loss, model, (numbers.normal(4, 3, 16, 16), numbers.integers(10, 4))


_NEEDS_AN_OLDER_JAX = (
    "runs on the oldest supported JAX. The last release of haliax does not import ([haliax #115]"
    "(https://github.com/marin-community/haliax/issues/115)), and the development version reads "
    "`jax.core.is_constant_dim`, which newer JAX does not have"
)


@FRAMEWORKS.add("haliax", note=_NEEDS_AN_OLDER_JAX)
def haliax_attention() -> Made:
    hax, numbers = import_module("haliax"), Numbers()
    attention = import_module("haliax.nn.attention")
    batch, place, key, heads, size, embed = hax.make_axes(B=2, P=8, K=8, H=4, D=8, E=32)

    def loss(params: Any, x: Any) -> Any:
        x = hax.named(x, (batch, place, embed))
        query, keys, values = (
            hax.dot(x, hax.named(params[name], (embed, heads, size)), axis=embed) for name in "qkv"
        )
        attended = attention.dot_product_attention(
            key, size, query, keys.rename({"P": "K"}), values.rename({"P": "K"})
        )
        out = hax.named(params["out"], (heads, size, embed))
        made = hax.dot(attended, out, axis=(heads, size))
        return hax.mean(hax.square(made - x)).scalar()

    params = {name: numbers.normal(32, 4, 8, scale=0.2) for name in "qkv"}
    params["out"] = numbers.normal(4, 8, 32, scale=0.2)
    return loss, params, (numbers.normal(2, 8, 32),)


@FRAMEWORKS.add("haliax", note=_NEEDS_AN_OLDER_JAX)
def haliax_stacked_with_checkpoints() -> Made:
    hax, numbers = import_module("haliax"), Numbers()
    embed, layer, batch = hax.Axis("E", 32), hax.Axis("L", 3), hax.Axis("B", 8)
    stacked = hax.nn.Stacked.init(layer, hax.nn.MLP, gradient_checkpointing=True)(
        embed,
        embed,
        32,
        1,
        activation=hax.nn.gelu,
        key=jax.random.split(jax.random.PRNGKey(0), 3),
    )

    def loss(stacked: Any, x: Any) -> Any:
        return hax.mean(hax.square(stacked.fold(hax.named(x, (batch, embed))))).scalar()

    return loss, stacked, (numbers.normal(8, 32),)


@FRAMEWORKS.add("penzai")
def penzai_llama() -> Made:
    pz, numbers = import_module("penzai.pz"), Numbers()
    common = import_module("penzai.models.transformer.variants.llamalike_common")
    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=2,
        vocab_size=_TOKENS,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        use_layer_stack=True,
    )
    model = common.build_llamalike_transformer(
        config, init_base_rng=jax.random.key(0), name="transformer"
    )
    unbound, variables = pz.unbind_params(model, freeze=True)

    def loss(variables: Any, tokens: Any) -> jax.Array:
        bound = pz.bind_variables(unbound, variables)
        logits = bound(pz.nx.wrap(tokens).tag("batch", "seq"))
        return next_token(logits.unwrap("batch", "seq", "vocabulary"), tokens)

    return loss, variables, (numbers.integers(_TOKENS, 2, 12),)


def _tunix(module: str, model: str, **more: Any) -> Made:
    library, numbers = import_module(module), Numbers()
    nnx = import_module("flax.nnx")
    config = library.ModelConfig(
        num_layers=2,
        vocab_size=_TOKENS,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=10000,
        norm_eps=1e-6,
        **more,
    )
    return _language(numbers, lambda: getattr(library, model)(config, rngs=nnx.Rngs(0)))


def _language(numbers: Numbers, make: Callable[[], Any]) -> Made:
    tokens = numbers.integers(_TOKENS, 2, 12)
    places = np.tile(np.arange(12), (2, 1))
    mask = np.tile(np.tril(np.ones((12, 12), bool)), (2, 1, 1))

    def loss(model: Any, tokens: Any, places: Any, mask: Any) -> Any:
        return next_token(model(tokens, places, None, mask)[0], tokens)

    return _nnx(numbers, make, loss, tokens, places, mask)


@FRAMEWORKS.add("google-tunix", "tunix")
def tunix_qwen3() -> Made:
    return _tunix("tunix.models.qwen3.model", "Qwen3")


@FRAMEWORKS.add("google-tunix", "tunix")
def tunix_qwen3_experts() -> Made:
    remat = import_module("tunix.models.qwen3.model").RematConfig.BLOCK
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "remat_config": remat}
    return _tunix("tunix.models.qwen3.model", "Qwen3", **experts)


@FRAMEWORKS.add("google-tunix", "tunix")
def tunix_llama3() -> Made:
    return _tunix("tunix.models.llama3.model", "Llama3")


@FRAMEWORKS.add("google-tunix", "tunix")
def tunix_gemma3() -> Made:
    library, numbers = import_module("tunix.models.gemma3.model"), Numbers()
    nnx = import_module("flax.nnx")
    config = dataclasses.replace(
        library.ModelConfig.gemma3_270m(),
        num_layers=2,
        num_embed=_TOKENS,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=1,
        sliding_window_size=4,
        param_dtype=jnp.float32,
    )
    return _language(numbers, lambda: library.Gemma3(config, rngs=nnx.Rngs(0)))


def _hugging_face(
    family: str, name: str, config: dict[str, Any], **options: Any
) -> tuple[Any, Any, Numbers]:
    """A Flax model of transformers, without downloads, and its parameters."""
    transformers, numbers = import_module("transformers"), Numbers()
    module = import_module(f"transformers.models.{family}.modeling_flax_{family}")
    configuration = getattr(transformers, name.partition(" ")[0])(**config)
    model = getattr(module, name.partition(" ")[2])(configuration, _do_init=False, **options)
    return model, numbers.filled(model.params_shape_tree), numbers


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@FRAMEWORKS.add("transformers")
def hugging_face_gpt2() -> Made:
    config = {"vocab_size": _TOKENS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model, params, numbers = _hugging_face(
        "gpt2", "GPT2Config FlaxGPT2LMHeadModel", config, input_shape=(1, 8)
    )

    def loss(params: Any, tokens: Any) -> Any:
        return next_token(model(tokens, params=params, train=False).logits, tokens)

    return loss, params, (numbers.integers(_TOKENS, 2, 12),)


@FRAMEWORKS.add("transformers")
def hugging_face_llama() -> Made:
    config = {
        **_SMALL,
        "vocab_size": _TOKENS,
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    model, params, numbers = _hugging_face(
        "llama", "LlamaConfig FlaxLlamaForCausalLM", config, input_shape=(1, 8)
    )

    def loss(params: Any, tokens: Any) -> Any:
        return next_token(model(tokens, params=params).logits, tokens)

    return loss, params, (numbers.integers(_TOKENS, 2, 12),)


@FRAMEWORKS.add("transformers")
def hugging_face_bert() -> Made:
    config = {
        **_SMALL,
        "vocab_size": _TOKENS,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    }
    model, params, numbers = _hugging_face(
        "bert", "BertConfig FlaxBertForMaskedLM", config, input_shape=(1, 8)
    )

    def loss(params: Any, tokens: Any) -> Any:
        mask = jnp.ones_like(tokens).at[:, 9:].set(0)
        made = model(
            tokens,
            attention_mask=mask,
            params=params,
            train=True,
            dropout_rng=jax.random.PRNGKey(0),
        )
        return cross_entropy(made.logits, tokens)

    return loss, params, (numbers.integers(_TOKENS, 2, 12),)


@FRAMEWORKS.add("transformers")
def hugging_face_vit() -> Made:
    config = {
        **_SMALL,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
    }
    model, params, numbers = _hugging_face("vit", "ViTConfig FlaxViTForImageClassification", config)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        return cross_entropy(model(images, params=params).logits, labels)

    return loss, params, (numbers.normal(4, 3, 16, 16), numbers.integers(10, 4))
