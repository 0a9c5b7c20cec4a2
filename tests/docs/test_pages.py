"""The documentation is true: its names, links, messages, and the README's diff."""

import inspect
import pathlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import halfstep
from halfstep._preflight.compile import lowering as _lowering, requirements as _requirements
from halfstep._preflight.target import mesh as _mesh, targets as _targets

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def without_code(text: str) -> str:
    """A page without its code, in which brackets and quotes mean other things."""
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


# Names.


def documented(prefix: str) -> set[str]:
    """What the API pages render below `prefix`."""
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    return set(re.findall(rf"^::: {re.escape(prefix)}\.([\w.]+)\s*$", text, re.MULTILINE))


def test_every_public_name_is_on_an_api_page():
    things = {name: thing for name, thing in vars(halfstep).items() if not name.startswith("_")}
    public = {name for name, thing in things.items() if not inspect.ismodule(thing)}
    assert {name for name in documented("halfstep") if "." not in name} == public


@pytest.mark.parametrize("package", ["compat", "integrations"])
def test_every_module_of_a_public_package_is_on_an_api_page(package: str):
    files = (ROOT / "halfstep" / package).glob("*.py")
    modules = {path.stem for path in files if not path.stem.startswith("_")}
    assert {name.split(".")[0] for name in documented(f"halfstep.{package}")} == modules


def test_the_api_index_lists_every_name():
    listed = set(re.findall(r"`([\w.]+)`", (DOCS / "api" / "index.md").read_text()))
    names = documented("halfstep")
    assert {name for name in names if "." not in name} <= listed


# Pages and links.


def nav_pages(nav: Any) -> Iterator[str]:
    """The pages of a `nav` entry of mkdocs.yml, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(entry)


def test_the_nav_lists_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(nav_pages(config["nav"]))
    assert sorted(listed) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_nothing_is_fetched_from_another_host():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert not any("//" in path for path in [*config["extra_css"], *config.get("extra_js", [])])


def anchors(page: pathlib.Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def broken_links(page: pathlib.Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        if anchor in ("only-light", "only-dark"):  # A picture for one kind of screen.
            anchor = ""
        path = (page.parent / name).resolve() if name else page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@every_page
def test_links_resolve(page: pathlib.Path):
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found():
    text = "[a](nowhere.md) [b](tour.md#no-such-heading) [c](tour.md#cast) `[d](code.md)`"
    expected = ["nowhere.md", "tour.md#no-such-heading"]
    assert broken_links(DOCS / "index.md", text) == expected


@every_page
def test_no_machine_paths_and_no_typographic_quotes(page: pathlib.Path):
    text = page.read_text()
    assert re.findall(r"(?<![\w.])/(?:tmp|work|home|root|Users)/[^\s`)]*", text) == []
    assert re.findall("[\u2018-\u201f\u00ab\u00bb\u2032\u2033\u00a0]", text) == []


# The README.


def test_the_readme_runs_the_result_of_its_diff():
    fences = FENCE.findall(README.read_text())
    (diff,) = (code for kind, code in fences if kind == "diff")
    snippet, *_ = (code for kind, code in fences if kind == "python")
    result = "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != "-")
    assert result in snippet


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 145


# Messages that the questions are listed by: each heading, and how to come by it.


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean(params * x)


def _half_only(params: Any, x: Any) -> Any:
    if x.dtype != jnp.bfloat16:
        raise TypeError("required bfloat16")
    return jnp.mean(params * x), x


def _scan(params: Any, x: Any) -> Any:
    last, _ = jax.lax.scan(lambda carry, x: (params * x, None), jnp.zeros(8), x)
    return jnp.mean(last)


def _cond(params: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.cond(x[0] > 0, lambda: params * x, lambda: jnp.zeros(8)))


def _commit(change: Callable[[Any], Any]) -> None:
    def step(finite: Any) -> Any:
        return halfstep.transaction(finite, change, {"w": jnp.ones(8)}, halfstep.Ledger())

    jax.jit(step)(True)


def _through_a_loop(rate: Any) -> Any:
    finite = halfstep.all_finite(rate)
    return halfstep.transaction(finite, lambda w: w * rate, jnp.ones(()), halfstep.Ledger())[0]


def _skip_twice() -> None:
    halfstep.Ledger(limit=2).record(False).record(False).check()


def _ones() -> jax.Array:
    return jnp.ones(8)


def _grad(func: Callable = _loss, *args: Any, x: Any = None, **options: Any) -> Any:
    return halfstep.filter_grad(func, *args, **options)(_ones(), _ones() if x is None else x)


def _inputs(func: Callable = _loss, **options: Any) -> Any:
    return _grad(func, policy="bf16:inputs", **options)


def _mistaken() -> None:
    # Unwrapped: in tests beartype would object first.
    inspect.unwrap(halfstep.filter_value_and_grad)(_loss, "bf16")


def _strict() -> None:
    with jax.numpy_dtype_promotion("strict"):
        _inputs(lambda params, x: jnp.mean(params * x + np.zeros(8, np.float32)))


def _without(package: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if package == "flatbuffers":
            patch.setattr("importlib.util.find_spec", lambda name: None)
        else:
            patch.setattr("importlib.util.find_spec", lambda name: name)
            patch.setattr(_requirements, "_version", lambda name: None)
        _requirements.compiler_versions("tpu" if package == "libtpu" else "cuda")


def _lower_a_callback() -> None:
    def step(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    _lowering.lower(step, (_ones(),), platform="cuda")


MESSAGES: dict[str, Callable[[], Any]] = {
    "computes in float16, whose small gradients vanish without loss scaling": lambda: _grad(
        policy="f16"
    ),
    "is a DynamicLossScaling, StaticLossScaling or NoLossScaling; got str": _mistaken,
    "finiteness was not checked: NoLossScaling compiles no check": lambda: bool(_grad()[1]),
    "DynamicLossScaling needs to know whether the gradients are finite": lambda: _grad(
        _loss, halfstep.DynamicLossScaling(), check_finite=False
    ),
    "selects nothing among": lambda: _grad(keep=("targets",)),
    "the loss must be a real floating-point scalar": lambda: _grad(lambda params, x: params * x),
    "with has_aux=True the function returns (loss, aux)": lambda: _grad(has_aux=True),
    "must be a power of two, so that scaling is exact": lambda: halfstep.DynamicLossScaling(65504),
    "needs the leading axis of every batch leaf to be a multiple of": lambda: _grad(
        microbatches=3, batch=("x",)
    ),
    "needs to know what to split": lambda: _grad(microbatches=2),
    "required a boolean scalar or the verdict of a gradient transform": lambda: (
        halfstep.select_tree(_ones(), _ones(), _ones())
    ),
    "a transaction needs the committed state to keep its tree structure": lambda: _commit(
        lambda state: {**state, "b": state["w"]}
    ),
    "a transaction needs the committed state to keep its dtypes and shapes": lambda: _commit(
        halfstep.cast_to_float16
    ),
    "Reverse-mode differentiation does not work for lax.while_loop": lambda: jax.grad(
        jax.jit(_through_a_loop)
    )(1.0),
    "steps in a row were skipped": _skip_twice,
    "is for nothing in this function": lambda: _grad(policy="bf16,op:tanh=compute"),
    "which is a call or a loop": lambda: _grad(
        _scan, x=jnp.ones((4, 8)), policy="bf16,op:scan=compute"
    ),
    "casts arguments and nothing else": lambda: halfstep.autocast(_loss, "bf16:inputs"),
    "is float32 or the compute dtype": lambda: halfstep.autocast(_loss, "bf16", reduce_dtype="f16"),
    "the function cannot be traced at its own dtypes": lambda: _inputs(_half_only, has_aux=True),
    "scan body function carry input and carry output must have equal types": lambda: _inputs(
        _scan, x=jnp.ones((4, 8))
    ),
    "cond branches must have equal output types but they differ": lambda: _inputs(_cond),
    "have no available implicit dtype promotion path": _strict,
    "casting to float64 needs 64-bit types, which are off": lambda: halfstep.cast_tree(
        _ones(), "f64"
    ),
    "Formats below 16 bits need a scale beside each array": lambda: halfstep.cast_tree(
        _ones(), jnp.float8_e4m3fn
    ),
    "JAX needs the package flatbuffers, which is not installed": lambda: _without("flatbuffers"),
    "compiling for an NVIDIA GPU needs XLA's GPU compiler": lambda: _without("jax-cuda12-plugin"),
    "compiling for a TPU needs XLA's TPU compiler": lambda: _without("libtpu"),
    "devices, but no argument is sharded over a mesh": lambda: _mesh.check_mesh(
        {}, _targets.parse_target("h100:8")
    ),
    "Change the axis sizes of the mesh, or the size in the target's name": lambda: _mesh.check_mesh(
        {"data": 4}, _targets.parse_target("h100:8")
    ),
    "the step calls back into Python": _lower_a_callback,
}


def test_every_message_in_the_questions_is_tested():
    headings = re.findall(r"^### `(.+)`$", (DOCS / "faq.md").read_text(), re.MULTILINE)
    assert headings == list(MESSAGES)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_what_the_questions_say(message: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match=re.escape(message)):
            MESSAGES[message]()
