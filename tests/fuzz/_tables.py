"""The operations of random programs, as text, by the kinds of their operands.

A kind is a letter and the least number of dimensions: `x` floating point, `w` float32, `m` a
float32 matrix, `i` integer, `b` Boolean, `k` a key of random numbers, `a` anything.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

Text = str | Callable[..., str | None]

_UNARY = (
    "jnp.tanh({0})",
    "jnp.sin({0})",
    "jnp.cos({0})",
    "jnp.exp(-jnp.abs({0}))",
    "jnp.log1p(jnp.abs({0}))",
    "jnp.sqrt(jnp.abs({0}) + 0.1)",
    "lax.rsqrt(jnp.square({0}) + 0.1)",
    "jax.nn.sigmoid({0})",
    "{0} * {0} * 0.5",
    "jnp.tanh({0}) ** 3",
    "jax.nn.gelu({0})",
    "jax.nn.gelu({0}, approximate=False)",
    "jax.nn.silu({0})",
    "jax.nn.relu({0})",
    "jax.nn.softplus({0})",
    "jnp.abs({0})",
    "-{0}",
    "jnp.sign({0})",
    "jnp.floor({0})",
    "lax.erf({0})",
    "jnp.expm1(jnp.minimum({0}, 2))",
    "jnp.arctan({0})",
    "{0} / 3",
    "1.0 / (jnp.abs({0}) + 0.5)",
    "jnp.cbrt(jnp.abs({0}) + 0.2)",
    "jax.nn.log_sigmoid({0})",
    "{0} + 1e-8",
    "jnp.where({0} > 0, {0}, -1e9) * 1e-9",
    "jax.nn.elu({0})",
    "jax.nn.relu6({0})",
    "lax.digamma(jnp.abs({0}) + 1)",
    "lax.lgamma(jnp.abs({0}) + 1)",
    "jnp.arcsinh({0})",
    "jnp.logaddexp({0}, 0.0)",
    "jnp.exp2(-jnp.abs({0}))",
    "jnp.round({0})",
    "jnp.nan_to_num({0})",
    "jnp.sinc({0})",
    "lax.reduce_precision({0}, 8, 7)",
    "lax.stop_gradient({0})",
    "checkpoint_name({0}, 'named')",
    "lax.optimization_barrier({0})",
)
_BINARY = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "jnp.maximum({0}, {1})",
    "jnp.minimum({0}, {1})",
    "{0} / (jnp.abs({1}) + 0.5)",
    "jnp.arctan2({0}, {1} + 0.1)",
    "jnp.power(jnp.abs({0}) + 0.3, jnp.tanh({1}))",
    "jnp.where({0} > {1}, {0}, {1} * 0.5)",
    "jnp.logaddexp({0}, {1})",
    "jnp.hypot({0}, {1} + 0.1)",
    "lax.stop_gradient({0}) + {1}",
    "{0} - jnp.mean({1})",
)
_REDUCTIONS = (
    "jnp.sum({0}, axis=AXIS)",
    "jnp.mean({0}, axis=AXIS, keepdims=True)",
    "jnp.max({0}, axis=AXIS)",
    "jnp.min({0}, axis=AXIS, keepdims=True)",
    "jnp.var({0}, axis=AXIS)",
    "jnp.prod(jnp.tanh({0}), axis=AXIS)",
    "jax.nn.logsumexp({0}, axis=AXIS)",
    "jnp.sqrt(jnp.var({0}, axis=AXIS) + 0.01)",
    "jnp.linalg.norm({0} + 0.3, axis=AXIS)",
    "jnp.median({0}, axis=AXIS)",
    "jnp.any({0} > 0.3, axis=AXIS)",
    "jnp.argmax({0}, axis=AXIS)",
    "jnp.argmin({0}, axis=AXIS)",
)
_ALONG = (
    "jax.nn.softmax({0}, axis=AXIS)",
    "jax.nn.log_softmax({0}, axis=AXIS)",
    "jnp.cumsum({0}, axis=AXIS)",
    "lax.cumlogsumexp({0}, axis=AXIS)",
    "lax.cummax({0}, axis=AXIS, reverse=True)",
    "jnp.sort({0}, axis=AXIS)",
    "jnp.argsort({0}, axis=AXIS)",
    "jnp.flip({0}, axis=AXIS)",
    "jax.nn.standardize({0}, axis=AXIS, epsilon=0.01)",
    "{0} / (jnp.linalg.norm({0}, axis=AXIS, keepdims=True) + 0.1)",
    "jnp.cumprod(jnp.tanh({0}), axis=AXIS)",
    "jnp.roll({0}, 1, axis=AXIS)",
    "lax.associative_scan(jnp.add, {0}, axis=AXIS, reverse=True)",
    "lax.associative_scan(lambda p, q: jnp.tanh(p * q + p), {0}, axis=AXIS)",
    "jnp.diff({0}, axis=AXIS)",
    "jnp.repeat({0}, 2, axis=AXIS)",
    "jnp.moveaxis({0}, AXIS, 0)",
    "jnp.concatenate([{0}, {0} * 0.5], axis=AXIS)",
    "jnp.take({0}, jnp.arange(2) % {0}.shape[AXIS], axis=AXIS)",
    "{0} - jnp.max({0}, axis=AXIS, keepdims=True)",
    "jnp.stack([{0}, jnp.tanh({0})], axis=AXIS)",
    "jnp.split({0}, [1], axis=AXIS)[0]",
)
_SHAPES = (
    "{0}.ravel()",
    "{0}.T",
    "{0}[None]",
    "jnp.broadcast_to({0}, (2, *{0}.shape))",
    "jnp.expand_dims({0}, -1)",
    "jnp.squeeze({0})",
    "{0}.reshape(-1, 1) + 0.0",
    "jnp.diag({0}.ravel()[:3])",
    "{0}[..., :0] if {0}.ndim else {0}",
)
_ROWS = (
    "{0}[::-1][: max(1, {0}.shape[0] // 2)]",
    "lax.pad({0}, np.asarray(0.5, {0}.dtype), [(1, 0, 1)] + [(0, 0, 0)] * ({0}.ndim - 1))",
    "jnp.concatenate([{0}, jnp.ones_like({0}[:1]), jnp.tanh({0})], 0)",
    "jax.ops.segment_sum({0}, jnp.arange({0}.shape[0]) % 2, 2)",
    "lax.top_k({0}, max(1, {0}.shape[-1] // 2))[0]",
    "lax.sort(({0}, {0} * 0.5), num_keys=1)[1]",
    "lax.reduce_window({0}, np.asarray(0, {0}.dtype), lax.add, (1,) * {0}.ndim, "
    "(1,) * {0}.ndim, 'SAME')",
    "lax.reduce_window({0}, np.asarray(-np.inf, {0}.dtype), lax.max, (2,) * {0}.ndim, "
    "(1,) * {0}.ndim, 'SAME')",
    "lax.reduce(lax.stop_gradient({0}), np.zeros((), {0}.dtype), lax.add, (0,))",
)
_INDEXED = (
    "{0}[{1} % {0}.shape[0]]",
    "jnp.take({0}, {1}, axis=0, mode='clip')",
    "{0}.at[{1}].get(mode='fill', fill_value=0)",
    "{0}[{1}.ravel()[0] % {0}.shape[0]]",
    "lax.dynamic_slice_in_dim({0}, {1}.ravel()[0], 1, 0)",
    "lax.dynamic_update_slice_in_dim({0}, jnp.tanh({0}[:1]), {1}.ravel()[0], 0)",
    "{0}.at[{1}.ravel()[:3] % {0}.shape[0]].add(jnp.tanh({0}[:1]))",
    "{0}.at[{1}.ravel()[0] % {0}.shape[0]].set(0.5)",
    "{0}.at[0].multiply(jnp.tanh({0}[-1]))",
    "{0}.at[0].max({0}[-1])",
    "{0}.at[{1}.ravel()[:2] % {0}.shape[0]].apply(jnp.tanh)",
)
_EINSUMS = (
    "ij,ij->ij",
    "ij,jk->ik",
    "ij,kj->ik",
    "ij,kj->ki",
    "ij,kl->il",
    "ij,ik->jk",
    "ij,kl->ikjl",
    "ij,ij->",
)
_INTEGERS = (
    "{0} + 1",
    "{0} * 2 % 5",
    "{0} ^ 3",
    "jnp.cumsum({0}, dtype=jnp.int32) % 7",
    "{0}.astype(jnp.int32)",
    "{0} > 1",
    "lax.population_count({0})",
    "jax.nn.one_hot({0}, 4)",
)
_RANDOM = (
    "jax.random.split({0})[0]",
    "jax.random.normal({0}, {1}.shape) * {1}",
    "jnp.where(jax.random.bernoulli({0}, 0.5, {1}.shape), {1} / 0.5, 0.0)",
    "jax.random.uniform({0}, (3,))",
    "jax.random.fold_in({0}, 3)",
    "jax.random.randint({0}, (2,), 0, 3)",
    "jax.random.gumbel({0}, {1}.shape) * 0.1 + {1}",
)
_LINEAR_ALGEBRA = (
    "jnp.linalg.cholesky(definite({0}, (3, 3)))",
    "jnp.linalg.inv(definite({0}, (3, 3)))",
    "jnp.linalg.slogdet(definite({0}, (3, 3)))[1]",
    "jnp.linalg.eigvalsh(definite({0}, (3, 3)) + jnp.diag(jnp.arange(3.0)))",
    "jax.scipy.linalg.expm(jnp.tanh(fit({0}, (3, 3))) * 0.3)",
    "jnp.abs(jnp.fft.rfft({0}) + 0.1j) * 0.5",
    "jnp.real(jnp.fft.ifft(jnp.fft.fft({0}) * 0.5))",
)
_CONSTANTS = (
    "jnp.arange(3)",
    "jnp.linspace(0, 1, 4)",
    "jnp.asarray(0.5)",
    "jnp.eye(3)",
    "jnp.full((2, 2), 0.7)",
    "jnp.asarray(np.float32([[0.3, -1.1], [0.9, 0.2]]))",
)


def _along(texts: Sequence[str]) -> Text:
    def text(choice: random.Random, aval: Any, *_: Any) -> str:
        return choice.choice(texts).replace("AXIS", str(choice.randrange(len(aval.shape))))

    return text


def _product(choice: random.Random, left: Any, right: Any) -> str | None:
    """A `dot_general` with random dimensions summed and shared."""
    pairs = [
        (i, j)
        for i, size in enumerate(left.shape)
        for j, other in enumerate(right.shape)
        if size == other
    ]
    choice.shuffle(pairs)
    summed: list[tuple[int, int]] = []
    shared: list[tuple[int, int]] = []
    for i, j in pairs:
        used = summed + shared
        if len(used) < choice.choice((1, 2, 3)) and all(i != a and j != b for a, b in used):
            (summed if choice.random() < 0.6 else shared).append((i, j))
    terms = math.prod(left.shape[i] for i, _ in summed)
    numbers = tuple(
        (tuple(i for i, _ in part), tuple(j for _, j in part)) for part in (summed, shared)
    )
    options = choice.choice(("", "", ", precision='highest'"))
    if left.dtype != right.dtype:
        given = "{0}.astype(jnp.float32), {1}.astype(jnp.float32)"
    else:
        given = "{0}, {1}"
        options += choice.choice(("", "", ", preferred_element_type=jnp.float32"))
    return f"lax.dot_general({given}, {numbers}{options}) * {terms**-0.5:.3g}"


def _matrix(choice: random.Random, left: Any, _: Any) -> str:
    size = left.shape[-1]
    columns = choice.choice((1, 2, 3, 4))
    return f"{{0}} @ fit({{1}}, ({size}, {columns})) * {size**-0.5:.3g}"


def _convolution(choice: random.Random, *_: Any) -> str:
    spatial, groups = choice.choice((1, 1, 2)), choice.choice((1, 1, 2))
    width, inputs, outputs = choice.choice((1, 2, 3)), choice.choice((2, 4)), choice.choice((2, 4))
    names = ("NWC", "WIO", "NWC") if spatial == 1 else ("NHWC", "HWIO", "NHWC")
    left = (2, *(4, 3)[:spatial], inputs)
    right = (*(width,) * spatial, inputs // groups, outputs)
    padding = choice.choice(("'SAME'", "'VALID'", f"[(1, 2)] * {spatial}"))
    options = f"window_strides=({choice.choice((1, 2))},) * {spatial}, padding={padding}"
    options += f", feature_group_count={groups}, dimension_numbers={names}"
    if choice.random() < 0.3:
        options += f", rhs_dilation=(2,) * {spatial}"
    return f"lax.conv_general_dilated(fit({{0}}, {left}), fit({{1}}, {right}), {options}) * 0.3"


def _cast(choice: random.Random, aval: Any) -> str:
    dtypes = ("float32", "float32", "bfloat16", "float16", "int32", "bool", "uint8")
    return f"fit({{0}}, {aval.shape}, '{choice.choice(dtypes)}')"


_PRODUCTS: Sequence[tuple[str, Sequence[Text]]] = (
    ("x1 x1", (_product,)),
    ("x1 w1", (_matrix,)),
    ("m m", tuple(f"jnp.einsum('{text}', {{0}}, {{1}}) * 0.5" for text in _EINSUMS)),
    ("w1 w1", (_convolution,)),
)
OPERATIONS: Sequence[tuple[str, Sequence[Text]]] = (
    *_PRODUCTS,
    *_PRODUCTS,
    *_PRODUCTS,
    ("w1 w1", ("lax.ragged_dot(fit({0}, (5, 3)), fit({1}, (2, 3, 4)), jnp.asarray([2, 3]))",)),
    (
        "w1 w1",
        (
            "jax.nn.dot_product_attention(*(fit(v, (1, 3, 2, 4)) for v in ({0}, {1}, {0})))",
            "jax.nn.dot_product_attention(*(fit(v, (1, 3, 2, 4)) for v in ({1}, {0}, {0})), "
            "is_causal=True)",
        ),
    ),
    ("x", _UNARY),
    ("x", _UNARY),
    ("x", _UNARY),
    ("x x", _BINARY),
    ("x x", _BINARY),
    ("x x", _BINARY),
    ("x1", (_along(_REDUCTIONS),)),
    ("x1", (_along(_REDUCTIONS),)),
    ("x1", (_along(_ALONG),)),
    ("x1", (_along(_ALONG),)),
    ("x", _SHAPES),
    ("x1", _ROWS),
    ("x1 i", _INDEXED),
    ("b x", ("jnp.where(fit({0}, {1}.shape, 'bool'), {1}, -0.5)",)),
    ("x", ("jnp.clip({0}, -1.0, 1.0)", "{0} > jnp.mean({0})")),
    ("i1", _INTEGERS),
    ("a", (_cast,)),
    ("k w", _RANDOM),
    ("w1", _LINEAR_ALGEBRA),
    ("", _CONSTANTS),
)
CALLS: Sequence[str] = (
    "jax.jit({f})",
    "jax.jit({f}, inline=True)",
    "jax.checkpoint({f})",
    "jax.checkpoint({f}, policy=policies.dots_saveable)",
    "jax.checkpoint({f}, policy=policies.nothing_saveable, prevent_cse=False)",
    "jax.checkpoint({f}, policy=policies.save_only_these_names('named'))",
    "with_jvp({f})",
    "with_vjp({f})",
    "with_vjp({f}, kept='inputs')",
    "halfstep.autocast({f}, 'bf16')",
    "(lambda *v: jax.named_call({f}, name='layer')(*v))",
)
DERIVATIVES: Sequence[str] = (
    "jax.grad(half_sum({f}))({0}, GIVEN)",
    "jax.value_and_grad(half_sum({f}))({0}, GIVEN)",
    "jax.jvp(lambda x: {f}(x, GIVEN)[0], ({0},), (jnp.ones_like({0}),))",
    "jax.vjp(lambda x: {f}(x, GIVEN)[0], {0})[1](jnp.tanh({0}))[0]",
    "jax.linearize(lambda x: {f}(x, GIVEN)[0], {0})[1](jnp.ones_like({0}))",
)
MESHES: Sequence[tuple[str, ...]] = (("data",), ("data", "model"))
COLLECTIVES: Sequence[str] = (
    "(VALUE * 1.0)",
    "lax.psum(VALUE, AXIS)",
    "lax.pmean(VALUE, AXIS)",
    "jnp.mean(lax.all_gather(VALUE, AXIS), 0)",
    "lax.ppermute(VALUE, AXIS, [(0, 1), (1, 0)])",
)
