"""torch.amp on a CPU: `autocast` and `GradScaler`."""

import importlib
import importlib.util
import math
import socket
from collections.abc import Callable
from typing import Any

from benchmarks._peers import _probe

torch: Any = importlib.import_module("torch")
importlib.import_module("torch.utils.checkpoint")

NO_JAX = "It is not a library for JAX."


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.float16)


def weight(*shape: int, value: float = 1.0) -> Any:
    return torch.full(shape, value, requires_grad=True)


class Product(torch.autograd.Function):
    """A product with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0].float() @ w.T, x.T @ grads[0].float()


def products() -> _probe.Found:
    """The dtypes of products of unchanged functions."""
    again = torch.utils.checkpoint.checkpoint
    cases: dict[str, Callable[..., Any]] = {
        "plain": lambda x, w: torch.tanh(x @ w) @ w,
        "checkpoint": lambda x, w: again(lambda x, w: x @ w, x, w, use_reentrant=False),
        "autograd.Function": Product.apply,
    }
    seen = {}
    for name, func in cases.items():
        w = weight(4, 4)
        with autocast():
            out = func(torch.ones(2, 4), w)
        out.float().sum().backward()
        assert w.grad.dtype == torch.float32
        seen[name] = str(out.dtype)
    good = sum(dtype == "torch.float16" for dtype in seen.values())
    return _probe.count(good, len(seen), ", ".join(f"{k}: {v}" for k, v in seen.items()) + ".")


def carry() -> _probe.Found:
    """A Python loop that begins with float32 zeros."""
    w, h, seen = weight(4, 4, value=0.5), torch.zeros(4), []
    with autocast():
        for x in torch.ones(2, 4):
            h = torch.tanh(x @ w + h @ w)
            seen.append(str(h.dtype))
    h.float().sum().backward()
    return _probe.decide(set(seen) == {"torch.float16"}, f"The carry of a loop: {', '.join(seen)}.")


def branches() -> _probe.Found:
    """A branch in Python."""
    w, seen = weight(4, 4), []
    with autocast():
        for flag in (True, False):
            seen.append(str((torch.ones(2, 4) @ w if flag else torch.zeros(2, 4)).dtype))
    return _probe.Found("yes", f"Python's `if`: its branches are {' and '.join(seen)}.")


def sums() -> _probe.Found:
    """The functions that overflow in float16."""
    one = weight()
    x = {"a": torch.full((4096,), 256.0), "b": torch.full((64,), 400.0), "c": torch.zeros(128256)}
    with autocast():
        values = {
            "a sum of 4,096 times 256": ((one * x["a"]).sum(), 4096 * 256.0),
            "a mean of squares of 400": (((one * x["b"]) ** 2).mean(), 160000.0),
            "a cross-entropy over 128,256 classes": (
                torch.logsumexp(one * x["c"], 0) - (one * x["c"])[0],
                math.log(128256),
            ),
        }
    good = sum(abs(float(value) / exact - 1) < 0.01 for value, exact in values.values())
    shown = ", ".join(
        f"{k} is {float(v):.6g} (exactly {exact:.6g})" for k, (v, exact) in values.items()
    )
    return _probe.count(good, len(values), f"{shown[0].upper()}{shown[1:]}.")


def shared() -> _probe.Found:
    """A weight that 4096 iterations share."""
    w, x = weight(), torch.ones(4096)
    with autocast():
        total: Any = sum((w * x[i]).float() for i in range(4096))
    total.backward()
    return _probe.decide(float(w.grad) == 4096, f"It is {float(w.grad):g}, exactly 4096.")


def leaves() -> _probe.Found:
    """Whole and complex numbers in products."""
    with autocast():
        whole = torch.tensor([2049]) @ torch.tensor([1])
        phase = torch.tensor([1 + 3j]) @ torch.tensor([1 + 3j])
    good = int(whole) == 2049 and complex(phase) == (1 + 3j) ** 2
    return _probe.decide(good, f"Products of whole and complex numbers: {int(whole)}, {phase}.")


def statistics() -> _probe.Found:
    """`BatchNorm1d` on numbers of standard deviation 400."""
    norm = torch.nn.BatchNorm1d(1, momentum=1.0)
    with autocast():
        norm(torch.tensor([[-400.0], [400.0]] * 32).half())
    var = norm.running_var
    good = var.dtype == torch.float32 and abs(float(var) / 160000 - 1) < 0.05
    return _probe.decide(good, f"`BatchNorm1d.running_var` is {float(var):g} in {var.dtype}.")


# The scale of the loss.


def scaler(scale: float = 2.0**10, interval: int = 2000) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def step(one: Any, w: Any, optimizer: Any, x: Any) -> None:
    """As its documentation has it."""
    optimizer.zero_grad()
    with autocast():
        loss = (w * x).sum()
    one.scale(loss).backward()
    one.step(optimizer)
    one.update()


def float32_loss() -> _probe.Found:
    w, one = weight(1024), scaler(2.0**15)
    with autocast():
        loss = (w * torch.full((1024,), 2.21)).half().mean()
    scaled = one.scale(loss)
    scaled.backward()
    return _probe.decide(
        bool(torch.isfinite(scaled)),
        f"A loss of {float(loss):.4g} in {loss.dtype}, at a scale of 32,768, is {float(scaled):g} "
        f"in {scaled.dtype}.",
    )


def growth() -> _probe.Found:
    w, one, seen = weight(1, value=0.0), scaler(2.0**10, 3), []
    optimizer = torch.optim.SGD([w], lr=1.0)
    for _ in range(6):
        before = float(w)
        step(one, w, optimizer, torch.full((1,), 0.5))
        seen.append(before - float(w))
    assert one.get_scale() > 2.0**10
    return _probe.decide(set(seen) == {0.5}, f"Updates of 0.5 are {', '.join(map(str, seen))}.")


def bounds() -> _probe.Found:
    parts, good = [], 0
    for name, x, interval in (("bad steps", math.nan, 2000), ("steps that could grow", 0.0, 1)):
        w, one = weight(1, value=0.0), scaler(2.0**15, interval)
        optimizer = torch.optim.SGD([w], lr=1.0)
        for _ in range(400):
            step(one, w, optimizer, torch.full((1,), x))
        end = one.get_scale()
        after = []
        for _ in range(150):
            before = float(w)
            step(one, w, optimizer, torch.full((1,), 0.125))
            after.append(before - float(w))
        right = 0.125 in after[-2:]
        good += right and 0 < end < math.inf
        then = "right" if right else f"{after[-1]:g} instead of 0.125"
        parts.append(f"After 400 {name} the scale is {end:g}, and updates later are {then}")
    return _probe.count(good, 2, f"{'. '.join(parts)}.")


def skip() -> _probe.Found:
    w, one = weight(8), scaler()
    optimizer = torch.optim.AdamW([w], lr=1e-2)
    step(one, w, optimizer, torch.full((8,), 0.5))
    kept = [w.detach().clone(), *(v.clone() for v in optimizer.state[w].values())]
    bad = torch.full((8,), 0.5)
    bad[3] = math.inf
    step(one, w, optimizer, bad)
    same = [torch.equal(a, b) for a, b in zip(kept, [w, *optimizer.state[w].values()], strict=True)]
    return _probe.decide(
        all(same),
        f"After a bad batch {sum(same)} of {len(same)} tensors of parameters and AdamW's state are "
        "as before.",
    )


def metric() -> _probe.Found:
    w, one = weight(2), scaler()
    step(one, w, torch.optim.SGD([w], lr=1.0), torch.ones(2))
    scale = one.get_scale()
    return _probe.decide(
        scale == 1024, f"It is given the loss only; the scale of 1024 is {scale:g} afterwards."
    )


def names_leaf() -> _probe.Found:
    w, one = weight(2), scaler()
    optimizer = torch.optim.SGD([w], lr=1.0)
    optimizer.zero_grad()
    one.scale((w * math.inf).sum()).backward()
    said = one.step(optimizer)
    one.update()
    public = [name for name in dir(one) if not name.startswith("_")]
    return _probe.decide(
        said is not None and "w" in str(said),
        f"`step` returns {said}, and none of {', '.join(f'`{n}`' for n in public)} says which.",
    )


def _rank(rank: int, port: int, scales: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    one, optimizer = scaler(), torch.optim.SGD(net.parameters(), lr=1.0)
    one.scale(net(torch.full((1, 1), math.inf if rank else 1.0)).sum()).backward()
    one.step(optimizer)
    one.update()
    scales[rank] = one.get_scale()
    torch.distributed.destroy_process_group()


def shards() -> _probe.Found:
    """Two processes, one of which overflows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scales = torch.zeros(2).share_memory_()
    torch.multiprocessing.spawn(_rank, (port, scales), nprocs=2)
    return _probe.decide(
        scales.tolist() == [512.0, 512.0],
        "Scales of two processes with `DistributedDataParallel`: "
        f"{', '.join(f'{s:g}' for s in scales.tolist())}.",
    )


# The rest.


def checkpoint() -> _probe.Found:
    w, one = weight(2), scaler(2.0**12, 5)
    optimizer = torch.optim.SGD([w], lr=0.0)
    for x in (0.5, 0.5, math.nan, 0.5, 0.5, 0.5):
        step(one, w, optimizer, torch.full((2,), x))
    other = scaler(2.0**12, 5)
    other.load_state_dict(one.state_dict())
    seen = []
    for each in (one, other):
        for _ in range(12):
            step(each, w, optimizer, torch.full((2,), 0.5))
        seen.append(each.get_scale())
    return _probe.decide(
        seen[0] == seen[1], f"`state_dict`: both go on to {seen[0]:g}, {seen[1]:g}."
    )


def rules() -> _probe.Found:
    w, x = weight(4, 4), torch.ones(2, 4)
    with autocast():
        low = x @ w
        with torch.autocast("cpu", enabled=False):
            kept = x @ w
    assert (low.dtype, kept.dtype) == (torch.float16, torch.float32)
    _probe.absent(torch.amp, "rule", "policy")
    return _probe.Found(
        "partly",
        "`autocast(enabled=False)` inside the model's code; its page lists no rule.",
    )


def microbatches() -> _probe.Found:
    w, one = weight(1), scaler()
    optimizer = torch.optim.SGD([w], lr=1.0)
    for x in (0.5, math.inf):
        one.scale((w * x).sum()).backward()
    one.step(optimizer)
    one.update()
    return _probe.decide(
        float(w) == 1 and one.get_scale() == 512,
        f"One of two microbatches is bad: the step is skipped, and the scale is {one.get_scale():g}"
        " instead of 1024.",
    )


def fp8() -> _probe.Found:
    def low() -> Any:
        with torch.autocast("cpu", dtype=torch.float8_e4m3fn):
            return torch.ones(16, 16) @ torch.ones(16, 16)

    made: list[Any] = []
    error = _probe.error_of(lambda: made.append(low()))
    seen = error or f"the product is in {made[0].dtype}"
    assert error is not None or made[0].dtype == torch.float32
    return _probe.Found("absent", f"`torch.autocast` with `float8_e4m3fn`: {seen}.")


def stored_bytes() -> _probe.Found:
    w = weight(1024, 1024)
    optimizer = torch.optim.AdamW([w])
    w.sum().backward()
    optimizer.step()
    tensors = [w, *optimizer.state[w].values()]
    size = sum(t.numel() * t.element_size() for t in tensors) / w.numel()
    return _probe.Found(
        "no", f"{size:.2f} bytes per parameter for parameters and state of AdamW.", f"{size:.2f}"
    )


def release() -> _probe.Found:
    """Steps from hooks of the backward pass; the scaler has no part in them."""
    ws = [weight(2), weight(2)]
    optimizers = {w: torch.optim.SGD([w], lr=1.0) for w in ws}

    def hook(w: Any) -> None:
        optimizers[w].step()
        w.grad = None

    for w in ws:
        w.register_post_accumulate_grad_hook(hook)
    (ws[0] * ws[1]).sum().backward()
    assert all(w.grad is None and float(w.sum()) == 0 for w in ws)
    return _probe.Found(
        "partly",
        "A hook of each parameter steps it in the backward pass; written by hand, and without "
        "`GradScaler`, whose step is over all of them.",
    )


def nothing_of_jax() -> _probe.Found:
    assert importlib.util.find_spec("jax") is None
    return _probe.Found("absent", NO_JAX)


PROBES = {
    **{
        probe.__name__: probe
        for probe in (
            products,
            carry,
            branches,
            sums,
            shared,
            leaves,
            statistics,
            rules,
            float32_loss,
            growth,
            bounds,
            skip,
            metric,
            names_leaf,
            shards,
            checkpoint,
            microbatches,
            fp8,
            stored_bytes,
            release,
        )
    },
    **_probe.absences(torch.amp, "why", "limit", "memory", "bisect"),
    "fp8_backward": fp8,
    "newest": nothing_of_jax,
    "no_device": nothing_of_jax,
}

if __name__ == "__main__":
    _probe.report(PROBES, "torch")
