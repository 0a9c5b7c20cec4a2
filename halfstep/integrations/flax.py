"""Save halfstep's pytrees with `flax.serialization`: importing this module registers them.

```python
import flax.serialization
import halfstep
import halfstep.integrations.flax

state = {"scaling": halfstep.DynamicLossScaling(2**12), "ledger": halfstep.Ledger()}
data = flax.serialization.to_bytes(state)
target = {"scaling": halfstep.DynamicLossScaling(), "ledger": halfstep.Ledger()}
restored = flax.serialization.from_bytes(target, data)
assert restored["scaling"].loss_scaling == 2**12
```

Every field is saved, including those that are not arrays, and the saved value wins over the
target's: a run continues with the period and the limits it was started with.
"""

import dataclasses
import json
from typing import Any, get_args

import flax.serialization
import jax.numpy as jnp

from halfstep._autocast import check_sites
from halfstep._training import (
    DynamicLossScaling,
    F8Scaling,
    Ledger,
    NoLossScaling,
    SiteState,
    StaticLossScaling,
    Verdict,
)

_Node = DynamicLossScaling | StaticLossScaling | NoLossScaling | Ledger | Verdict | SiteState


def _where(name: str, owner: type) -> str:
    return f"`{name}` of {owner.__name__} at `{flax.serialization.current_path()}`"


def _describe(value: object) -> str:
    if value is None:
        return "None"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    return repr(value) if dtype is None else f"{dtype}{list(shape or ())}"


def _to_state_dict(node: _Node) -> dict[str, Any]:
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    # Flax cannot write tuples.
    return {n: json.dumps(v) if isinstance(v, tuple) else v for n, v in values.items()}


def _restore_array(value: Any, target: object, name: str, owner: type) -> Any:
    # Flax would replace arrays by others of any dtype and shape, and the next step would recompile
    # or fail.
    if _describe(value) != _describe(target):
        raise ValueError(
            f"{_where(name, owner)} must be {_describe(target)}, as in the target; the saved one "
            f"is {_describe(value)}. Restore into a target made the way the saved one was."
        )
    return None if value is None else jnp.asarray(value)


def _restore_static(value: object, target: object, name: str, owner: type) -> Any:
    if isinstance(target, tuple) and isinstance(value, str):
        return tuple(tuple(item) for item in json.loads(value))
    # `limit` is the only field that holds a number or `None`. The others have the target's types.
    kinds = (int, type(None)) if name == "limit" else (type(target),)
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(
            f"{_where(name, owner)} must be {wanted}; the saved one is {_describe(value)}. "
            "Restore a state that halfstep has saved."
        )
    return value


def _from_state_dict(target: _Node, state: object) -> _Node:
    owner = type(target)
    fields = {field.name: field for field in dataclasses.fields(target)}
    if not isinstance(state, dict) or set(state) != set(fields):
        saved = sorted(state) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"{owner.__name__} at `{flax.serialization.current_path()}` needs exactly the fields "
            f"{sorted(fields)}; saved are {saved}. Restore into a target of the type that was "
            "saved."
        )
    restored = object.__new__(owner)
    for name, field in fields.items():
        restore = _restore_static if field.metadata.get("static", False) else _restore_array
        value = restore(state[name], getattr(target, name), name, owner)
        # The object is frozen, and its constructor takes other arguments than its fields.
        object.__setattr__(restored, name, value)
    return restored


def _register(*owners: type) -> None:
    for owner in owners:
        # `override` allows importing this module again after a reload, which is not a mistake.
        flax.serialization.register_serialization_state(
            owner, _to_state_dict, _from_state_dict, override=True
        )


def _recipe_to_state_dict(node: F8Scaling) -> dict[str, Any]:
    return {
        "loss": flax.serialization.to_state_dict(node.loss),
        "sites": {
            name: flax.serialization.to_state_dict(site) for name, site in node.sites.items()
        },
        "key": node.key,
        "step": node.step,
        "recipe": node.recipe.name,
        "off": list(node.off),
    }


def _recipe_from_state_dict(target: F8Scaling, state: dict[str, Any]) -> F8Scaling:
    if state["recipe"] != target.recipe.name:
        raise ValueError(
            f"{_where('recipe', F8Scaling)} must be {target.recipe.name!r}, as in the target; the "
            f"saved one is {state['recipe']!r}. Restore into a target made the way the saved one "
            "was."
        )
    # Check the sites before Flax compares the keys: its message would not say what a site is.
    check_sites(list(state["sites"]), list(target.sites))
    loss: Any = flax.serialization.from_state_dict(target.loss, state["loss"])
    sites: dict[str, Any] = {
        name: flax.serialization.from_state_dict(site, state["sites"][name])
        for name, site in target.sites.items()
    }
    return F8Scaling(
        loss=loss,
        sites=sites,
        key=_restore_array(state["key"], target.key, "key", F8Scaling),
        step=_restore_array(state["step"], target.step, "step", F8Scaling),
        recipe=target.recipe,
        # Flax writes a list as a dictionary of its indices.
        off=tuple(state["off"].values() if isinstance(state["off"], dict) else state["off"]),
    )


_register(*get_args(_Node))
flax.serialization.register_serialization_state(
    F8Scaling, _recipe_to_state_dict, _recipe_from_state_dict, override=True
)
