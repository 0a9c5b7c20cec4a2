"""The page of common errors shows each message as it is raised."""

import importlib.metadata
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import debug, optim
from halfstep._preflight.compile import lowering
from halfstep._preflight.target import mesh, targets
from halfstep.integrations.orbax import Checkpoints

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "errors.md"


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean(params["w"] * x)


def params() -> dict[str, jax.Array]:
    return {"w": jnp.ones(8)}


def gradient(
    func: Callable[..., Any] = loss_fn, *scaling: Any, x: Any = None, **options: Any
) -> Any:
    given = jnp.ones(8) if x is None else x
    return halfstep.filter_grad(func, *scaling, **options)(params(), given)


def preflight(**options: Any) -> Any:
    return halfstep.preflight(loss_fn, (params(), jnp.ones(8)), progress=False, **options)


def policy_as_scaling() -> None:
    # Unwrapped: the tests' type checker would object first.
    inspect.unwrap(halfstep.filter_grad)(loss_fn, "bf16")


def commit(change: Callable[[Any], Any]) -> None:
    def step(finite: Any) -> Any:
        return halfstep.transaction(finite, change, params(), halfstep.Ledger())

    jax.jit(step)(True)


def through_a_step(rate: Any) -> Any:
    finite = halfstep.all_finite(rate)
    return halfstep.transaction(finite, lambda w: w * rate, jnp.ones(()), halfstep.Ledger())[0]


def skip_twice() -> None:
    scaling = halfstep.DynamicLossScaling(2.0**15)
    ledger = halfstep.Ledger(limit=2)
    for _ in range(2):
        scaling, finite, _ = gradient(loss_fn, scaling, x=jnp.full(8, jnp.inf), policy="f16")
        ledger = ledger.record(finite)
    ledger.check()


def other_state() -> None:
    optimizer = optim.flash_adamw(1e-3)
    optimizer.step(params(), optax.adam(1e-3).init(params()), params())


def other_checkpoint() -> None:
    with Checkpoints(pathlib.Path("run")) as checkpoints:
        checkpoints.save(1, params())
        checkpoints.wait()
        checkpoints.restore({"w": jnp.ones(8, jnp.bfloat16)})


def without_the_compiler() -> None:
    version = importlib.metadata.version

    def installed(package: str) -> str:
        if package in ("jax", "jaxlib"):
            return version(package)
        raise importlib.metadata.PackageNotFoundError(package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", installed)
        preflight(targets="h100")


def without_matplotlib() -> None:
    log = debug.record(loss_fn).init(params(), jnp.ones(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        log.plot("magnitudes.png")


def callback() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    lowering.lower(step, (jnp.ones(8),), platform="cuda")


def last_product(params: Any, xs: Any) -> Any:
    last, _ = jax.lax.scan(lambda carry, x: (params["w"] * x, None), jnp.zeros(8), xs)
    return jnp.mean(last)


def strict_promotion() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(params["w"] * x + np.zeros(8, np.float32))

    with jax.numpy_dtype_promotion("strict"):
        gradient(loss, policy="bf16:inputs")


# Headings of the page, and how to come by the message below each of them.
ROWS: dict[str, Callable[[], Any]] = {
    "Unknown policy name": lambda: gradient(policy="bf61"),
    "Policy passed in place of the loss scaling": policy_as_scaling,
    "float16 without loss scaling": lambda: gradient(policy="f16"),
    "A `keep` or `batch` rule that selects nothing": lambda: gradient(
        policy="bf16", keep=("targets",)
    ),
    "A policy rule that matches no operation": lambda: gradient(policy="bf16,op:tanh=compute"),
    "A plain cast to an 8-bit format": lambda: halfstep.cast_tree(params(), jnp.float8_e4m3fn),
    "The loss is not a floating-point scalar": lambda: gradient(lambda params, x: params["w"] * x),
    "`has_aux=True` and other than two results": lambda: gradient(
        lambda params, x: (loss_fn(params, x), x, x), has_aux=True
    ),
    "Microbatches without a `batch` rule": lambda: gradient(microbatches=2),
    "A batch that microbatches cannot split": lambda: gradient(microbatches=3, batch=("x",)),
    "A loss scale that is not a power of two": lambda: halfstep.DynamicLossScaling(65504),
    "A verdict that was not computed": lambda: bool(gradient()[1]),
    "An update that changes the tree structure": lambda: commit(
        lambda state: {**state, "b": state["w"]}
    ),
    "An update that changes dtypes or shapes": lambda: commit(halfstep.cast_to_float16),
    "Too many skipped steps in a row": skip_twice,
    "An fp8 recipe without its state": lambda: halfstep.autocast(loss_fn, "f8-delayed")(
        params(), jnp.ones(8)
    ),
    "A recipe that rounds at random, without a key": lambda: halfstep.RECIPES["nvfp4"].init(
        loss_fn, params(), jnp.ones(8)
    ),
    "A compressed optimizer without the parameters": lambda: optim.flash_adamw(1e-3).update(
        params(), optim.flash_adamw(1e-3).init(params())
    ),
    "Optimizer state of another optimizer": other_state,
    "A checkpoint that no longer fits the model": other_checkpoint,
    "Unknown accelerator": lambda: preflight(targets="h10"),
    "Preflight without XLA's compilers": without_the_compiler,
    "A donated argument that does not exist": lambda: preflight(
        targets="h100", donate_argnums=(2,)
    ),
    "Several devices and no mesh": lambda: mesh.check_mesh({}, targets.parse_target("h100:8")),
    "A callback in a step for preflight": callback,
    "A plot without matplotlib": without_matplotlib,
    "JAX: carry input and carry output differ": lambda: gradient(
        last_product, x=jnp.ones((4, 8)), policy="bf16:inputs"
    ),
    "JAX: no implicit dtype promotion path": strict_promotion,
    "JAX: reverse-mode differentiation of a loop": lambda: jax.grad(jax.jit(through_a_step))(1.0),
}


def raised(heading: str) -> str:
    """The last lines of the traceback, with single blanks."""
    try:
        ROWS[heading]()
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()
    raise AssertionError(f"{heading}: nothing was raised")


def shown() -> dict[str, str]:
    """The message below each heading of the page that has one."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        heading, _, rest = section.partition("\n")
        block = re.match(r"\s*```text\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
        found[heading] = re.sub(r"\s+", " ", block[1]).strip() if block else ""
    return found


def test_every_error_on_the_page_is_provoked():
    assert list(shown()) == list(ROWS)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("heading", ROWS)
def test_the_page_shows_what_is_raised(
    heading: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    # Dots on the page stand for what depends on the machine.
    pattern = ".*".join(map(re.escape, shown()[heading].split("...")))
    assert re.fullmatch(pattern, message := raised(heading)), message
