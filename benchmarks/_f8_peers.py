"""Other libraries that multiply in 8 bits, on the same models: what works is found by trying."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.linen import fp8_ops

from tests.models import transformers as _transformers
from tests.models.transformers import Case, hk

STATE = "_overwrite_with_gradient"
"""Where Flax keeps scales: what comes out as their gradient is their next value."""


class Peer(NamedTuple):
    """A library, and how it is applied to each framework's model."""

    package: str
    transformers: Mapping[str, Callable[[], Case]]
    trials: Mapping[str, Callable[[], Any]]
    """For other frameworks: the result of a single layer."""
    mlp: Callable[[int, int], Case]
    """Linen's two layers: their parameters are made of a width and the hidden one."""


class Mlp(linen.Module):
    """Two layers of Linen."""

    hidden: int
    product: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        up = linen.Dense(self.hidden, use_bias=False, dot_general_cls=self.product)
        down = linen.Dense(x.shape[-1], use_bias=False, dot_general_cls=self.product)
        return down(linen.gelu(up(x)))


def mlp(
    width: int, hidden: int, product: Any = None, wrap: Callable[[Any], Any] | None = None
) -> Case:
    """The loss of two layers, and the shapes of its parameters."""
    net = Mlp(hidden, product)
    net = net if wrap is None else wrap(net)
    x = jax.ShapeDtypeStruct((16, width), jnp.float32)
    params = jax.eval_shape(net.init, jax.random.key(0), x)
    return Case(params, lambda p, x: jnp.mean(jnp.square(_output(net, p, x))))


def _output(net: Any, params: Any, x: Any) -> Any:
    return net.apply(params, x)


def peers() -> dict[str, Peer]:
    """Those that are compared."""
    made = {
        f"Flax, {name}": _flax(getattr(fp8_ops, name))
        for name in ("Fp8DotGeneralOp", "Fp8DirectDotGeneralOp", "NANOOFp8DotGeneralOp")
    }
    made["qwix"] = _qwix()
    made["qwix, per tensor"] = _qwix(disable_channelwise_axes=True)
    return made


def is_absent(peer: Peer) -> bool:
    """Whether it is not installed."""
    return importlib.util.find_spec(peer.package) is None


# Flax: an operation that layers are told to multiply with.


def _flax(product: Any) -> Peer:
    # Where a layer takes no class of operations, one is told what to call.
    def equinox(**options: Any) -> Any:
        return eqx.nn.Linear(16, 16, key=jax.random.key(0), **options)(jnp.ones(16))

    def nnx_(**options: Any) -> Any:
        return nnx.Linear(16, 16, rngs=nnx.Rngs(0), **options)(jnp.ones((16, 16)))

    def haiku(**options: Any) -> Any:
        net = hk.transform(lambda x: hk.Linear(16, **options)(x))
        return net.init(jax.random.key(0), jnp.ones((16, 16)))

    return Peer(
        "flax",
        {"linen": lambda: _transformers.linen_(product)},
        {
            "equinox": lambda: equinox(dot_general=product()),
            "nnx": lambda: nnx_(dot_general=product()),
            "haiku": lambda: haiku(dot_general=product()),
        },
        lambda width, hidden: mlp(width, hidden, product),
    )


# qwix: changes the calls of a whole network. Only dense layers, as the others do.


def _qwix(**options: Any) -> Peer:
    def provider() -> Any:
        import qwix  # pyright: ignore[reportMissingImports]

        rule = qwix.QtRule(
            op_names=("dot_general",),
            weight_qtype=jnp.float8_e4m3fn,
            act_qtype=jnp.float8_e4m3fn,
            bwd_qtype=jnp.float8_e5m2,
            **options,
        )
        return qwix.QtProvider([rule])

    def changed(net: Any, *inputs: Any) -> Any:
        import qwix  # pyright: ignore[reportMissingImports]

        return qwix.quantize_model(net, provider(), *inputs)

    def equinox() -> Any:
        x = jnp.ones(16)
        return changed(eqx.nn.Linear(16, 16, key=jax.random.key(0)), x)(x)

    def haiku() -> Any:
        x = jnp.ones((16, 16))
        net = changed(hk.transform(lambda x: hk.Linear(16)(x)), x)
        return net.init(jax.random.key(0), x)

    ids = _transformers.data()[:, :-1]
    return Peer(
        "qwix",
        {
            "linen": lambda: _transformers.linen_(wrap=changed),
            "nnx": lambda: _transformers.nnx_(lambda net: changed(net, ids)),
        },
        {"equinox": equinox, "haiku": haiku},
        lambda width, hidden: mlp(width, hidden, wrap=changed),
    )


# Gradients.


@contextmanager
def quiet() -> Iterator[None]:
    """Without what peers say about what they will remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gradients(case: Case, batches: Sequence[Any], *, before: int = 2) -> Iterator[Any]:
    """The gradients of batches; where there are scales, after some steps on the first one."""
    func = jax.jit(jax.grad(case.loss))
    params = case.params
    if not (isinstance(params, Mapping) and STATE in params):
        yield from (func(params, batch) for batch in batches)
        return
    for number, batch in enumerate([*[batches[0]] * before, *batches]):
        grads = dict(func(params, batch))
        params = {**params, STATE: grads.pop(STATE)}
        if number >= before:
            yield grads
