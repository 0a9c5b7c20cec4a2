"""Every code example of the five documents that halfstep was made from, as a reader types it.

The documents are the paper of MPX (arXiv:2507.03312), the first README of MPfJ, an article about
mixed-precision training, the project page of flashoptim-jax, and the README of jaxamp. The project
page has lost its indentation on the way into the document, so it is put back here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Example(NamedTuple):
    """A code example."""

    document: str
    title: str
    code: str


MPX, MPFJ, ARTICLE = "mpx: paper", "MPfJ: README", "article"
FLASH, JAXAMP = "flashoptim-jax: page", "jaxamp: README"
COUNTS: Mapping[str, int] = MappingProxyType({MPX: 2, MPFJ: 0, ARTICLE: 0, FLASH: 14, JAXAMP: 8})
"""How many examples each document has. MPfJ's README ends where its example is to follow."""

_FOUND = (
    Example(
        MPX,
        "a step in full precision",
        """
grads = eqx.filter_grad(loss)(model, batch)
updates, optimizer_state = optimizer.update(
    grads, optimizer_state, eqx.filter(model, eqx.is_array))
model = eqx.apply_updates(model, updates)
""",
    ),
    Example(
        MPX,
        "a step in mixed precision",
        """
loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(
    model, batch)
model, optimizer_state = mpx.optimizer_update(
    model, optimizer, optimizer_state, grads, grads_finite)
""",
    ),
    Example(
        FLASH,
        "baseline of PyTorch",
        """
# init
w = torch.nn.Parameter(torch.randn(shape, dtype=torch.float32, device="cuda"))
opt = torch.optim.AdamW([w], lr=1e-3, weight_decay=1e-2, fused=True)
# step (autocast handles bf16 for forward/backward)
w.grad = grad_w
opt.step()
opt.zero_grad(set_to_none=True)
""",
    ),
    Example(
        FLASH,
        "baseline of JAX",
        """
# init
tx = optax.adamw(learning_rate=1e-3, weight_decay=1e-2)
opt_state = tx.init(params) # params are fp32
# step
@jax.jit(donate_argnums=(0, 1))
def step(params, opt_state, grads):
    updates, new_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), new_state
params, opt_state = step(params, opt_state, grads)
""",
    ),
    Example(
        FLASH,
        "FlashOptim of PyTorch",
        """
# init
from flashoptim import FlashAdamW
w = torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16, device="cuda"))
opt = FlashAdamW([w], lr=1e-3)
# step
w.grad = grad_w
opt.step()
""",
    ),
    Example(
        FLASH,
        "timing in PyTorch",
        """
# PyTorch timing
for _ in range(warmup):
    for _ in range(steps_per_sync): # steps_per_sync = 20
        w.grad = grad_w; opt.step(); opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
samples = []
for _ in range(steps): # steps = 200
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(steps_per_sync):
        w.grad = grad_w; opt.step(); opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    samples.append((time.perf_counter() - t0) * 1e6 / steps_per_sync) # µs
median_us = statistics.median(samples)
""",
    ),
    Example(
        FLASH,
        "timing in JAX",
        """
# JAX timing (identical structure, different sync)
for _ in range(warmup):
    for _ in range(steps_per_sync):
        params, opt_state = step(params, opt_state, grads)
    jax.block_until_ready((params, opt_state))
samples = []
for _ in range(steps):
    t0 = time.perf_counter()
    for _ in range(steps_per_sync):
        params, opt_state = step(params, opt_state, grads)
    jax.block_until_ready((params, opt_state))
    samples.append((time.perf_counter() - t0) * 1e6 / steps_per_sync)
median_us = statistics.median(samples)
""",
    ),
    Example(
        FLASH,
        "Triton via DLPack",
        """
# init
state = init_torch_flashoptim_state(params)
# step
def dlpack_step(params, state, grads):
    return jax.pure_callback(
        torch_flashoptim_step,
        result_shape_dtypes=(params, state),
        params, state, grads,
    )
step = jax.jit(dlpack_step)
params, state = step(params, state, grads)
""",
    ),
    Example(
        FLASH,
        "the core of the unfused path",
        """
# Reconstruct fp32 parameter from bf16 + error correction code
if use_ecc:
    param_f32 = reconstruct_leaf(param, ecc)
else:
    param_f32 = jnp.asarray(param, dtype=jnp.float32)
# Dequantize optimizer state from int8/uint8 back to fp32
mu_f32 = dequantize_momentum(mu, group_size) # int8 + fp16 scales → fp32
nu_f32 = dequantize_variance(nu, group_size) # uint8 + fp16 scales → fp32
# Standard AdamW update
mu_f32 = b1 * mu_f32 + (1 - b1) * grad_f32
nu_f32 = b2 * nu_f32 + (1 - b2) * grad_f32 ** 2
param_f32 = param_f32 * (1 - lr * weight_decay)
param_f32 = param_f32 - (lr / bc1) * mu_f32 / (sqrt(nu_f32 / bc2) + eps)
# Requantize and store
update = new_param.astype(param.dtype) - param # compute delta
new_mu = quantize_momentum(mu_f32, group_size) # fp32 → int8 + fp16 scales
new_nu = quantize_variance(nu_f32, group_size) # fp32 → uint8 + fp16 scales
""",
    ),
    Example(
        FLASH,
        "a step with donation",
        """
@jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_state, grads):
    updates, new_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, new_state
""",
    ),
    Example(
        FLASH,
        "unfused",
        """
# init
tx = flash_adamw(learning_rate=1e-3, fused=False)
state = tx.init(params)
# step
def train_step(params, state, grads):
    updates, new_state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, new_state
# without donation:
step = jax.jit(train_step)
# with donation:
step = jax.jit(train_step, donate_argnums=(0, 1))
""",
    ),
    Example(
        FLASH,
        "a fused kernel",
        """
import jax.experimental.pallas as pl
import jax.experimental.pallas.gpu as plgpu
def _flash_adamw_leaf_quantized_kernel(
    grad_ref, param_ref, ecc_ref,
    mu_values_ref, nu_values_ref, mu_scales_ref, nu_scales_ref,
    lr_ref, b1_ref, b2_ref, eps_ref, weight_decay_ref,
    bias_correction1_ref, bias_correction2_ref,
    update_ref, ecc_out_ref,
    mu_values_out_ref, mu_scales_out_ref,
    nu_values_out_ref, nu_scales_out_ref,
    block_size: int, group_size: int, ...
):
    pid = pl.program_id(0)
    offsets = pid * block_size + jnp.arange(block_size)
    # Load quantized state from global memory
    mu_vals = plgpu.load(mu_values_ref.at[offsets], ...) # int8
    mu_sc = plgpu.load(mu_scales_ref.at[...], ...) # fp16 per-group scales
    # ... (load everything else)
    # Dequantize in-register
    mu = inverse_softsign(mu_vals / 127.0) * mu_sc # int8 → fp32
    nu = (nu_vals / 255.0 * nu_sc) ** 2 # uint8 → fp32
    # Adam math in-register (weight decay + bias correction omitted for clarity)
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * grad ** 2
    param_f32 = param_f32 - lr * mu / (sqrt(nu) + eps)
    # Requantize in-register and write back
    mu_out = softsign(mu / absmax(mu)) * 127 # → int8
    nu_out = sqrt(nu) / absmax(sqrt(nu)) * 255 # → uint8
    plgpu.store(update_ref.at[offsets], new_param_lp - param_lp) # delta
    plgpu.store(mu_values_out_ref.at[offsets], mu_out)
    # ... (store everything else)
""",
    ),
    Example(
        FLASH,
        "fused, with a delta",
        """
# init
tx = flash_adamw(learning_rate=1e-3, fused=True, inplace=False)
state = tx.init(params)
# step — kernel outputs a delta, then we add it back
def train_step(params, state, grads):
    updates, new_state = tx.update(grads, state, params)
    new_params = optax.apply_updates(params, updates)
    return new_params, new_state
# without donation:
step = jax.jit(train_step)
# with donation:
step = jax.jit(train_step, donate_argnums=(0, 1))
""",
    ),
    Example(
        FLASH,
        "one line of the kernel",
        """
# Before (delta):
plgpu.store(update_ref.at[offsets], new_param_lp - param_lp) # delta
# After (direct-write):
plgpu.store(update_ref.at[offsets], new_param_lp) # full new value
""",
    ),
    Example(
        FLASH,
        "fused, with direct writes",
        """
# init
tx = flash_adamw(learning_rate=1e-3, fused=True, inplace=True)
state = tx.init(params)
# step — kernel writes final param values directly (no delta)
def train_step(params, state, grads):
    return tx.step(params, state, grads)
# without donation (kernel writes to fresh buffer):
step = jax.jit(train_step)
# with donation (kernel aliases input/output buffers):
step = jax.jit(train_step, donate_argnums=(0, 1))
""",
    ),
    Example(
        FLASH,
        "the final API",
        """
from flashoptim_jax import flash_adamw
tx = flash_adamw(learning_rate=1e-3, weight_decay=1e-2)
opt_state = tx.init(params)
@jax.jit(donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    return tx.step(params, opt_state, grads)
""",
    ),
    Example(JAXAMP, "installation", "\npip install jaxamp\n"),
    Example(
        JAXAMP,
        "usage in short",
        """
def loss(model, minibatch):
  ...

scaler_state= jaxamp.DynamicLossScaler()
amp_loss = jaxamp.amp(loss)
grad_fn = jaxamp.dynamic_scale_grad(amp_loss)
scaler_state, grad = grad_fn(model, minibatch, dynamic_scaler_state=scaler_state)
""",
    ),
    Example(
        JAXAMP,
        "the usual loop",
        """

def loss_fn(model_state, minibatch):
  ...
  return loss, accuracy

def train_step(model_state, opt_state, minibatch, optimizer):

  value_and_grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

  (loss, accuracy), grads = value_and_grad_fn(model_state, minibatch)

  updates, opt_state = optimizer.update(grads, opt_state, model_state)
  model_state = optax.apply_updates(model_state, updates)
  return model_state, opt_state, loss, accuracy

def train_loop(model_state, opt_state, optimizer, dataloader):
  train_step_jit = jax.jit(train_step, static_argnums=3)

  for minibatch in dataloader:
    model_state, opt_state, loss, accuracy = train_step_jit(model_state, opt_state, minibatch, optimizer)
    log_metrics(loss, accuracy)
  return model_state, opt_state
""",  # noqa: E501
    ),
    Example(
        JAXAMP,
        "the loop with amp",
        """

def train_step(
    model_state,
    opt_state,
    minibatch,
    dynamic_scaler_state,
    optimizer):
  amp_loss_fn = jaxamp.amp(loss_fn)
  
  value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(amp_loss_fn, has_aux=True)

  dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
    model_state,
    minibatch,
    dynamic_scaler_state=dynamic_scaler_state)

  updates, opt_state = optimizer.update(grads, opt_state, model_state)
  model_state = optax.apply_updates(model_state, updates)
  return model_state, opt_state, dynamic_scaler_state, loss, accuracy

def train_loop(model_state, opt_state, optimizer, dataloader):
  train_step_jit = jax.jit(train_step, static_argnums=3)
  dynamic_scaler_state = amp.DynamicScalerState()
  for minibatch in dataloader:
    model_state, opt_state, dynamic_scaler_state, loss, accuracy = train_step_jit(
      model_state,
      opt_state,
      minibatch,
      optimizer)
    log_metrics(loss, accuracy)
  return model_state, opt_state
""",  # noqa: W293
    ),
    Example(
        JAXAMP,
        "the signature of a precision function",
        """
def precision_fn(
    compute_dtype: Type,
    original_dtypes: Sequence[Type],
    *invars: Sequence[Array],
    *bind_params: Dict[str, Any]) -> Sequence[Array], Dict[str, Any]:
  \'\'\'
  Args:
    compute_dtype: this is the compute_dtype provided to `amp`.
    original_dtypes: these are the dtypes that original user code expected the arguments
        to the op we are about to transform were going  to be.
    invars: the input arrays to this operation (note that these dtypes may not match
        original_dtypes because of previous casting we might have performed).
    bind_params: the "meta" parameters to the op (things like axis specifications).
  returns
    new_invars, new_bind_params: the transformed values for invars and bind_params.
  \'\'\'
""",
    ),
    Example(
        JAXAMP,
        "a precision function",
        """
def use_compute_precision(
    compute_dtype: Type,
    original_dtypes: Sequence[Type],
    *invars: Sequence[Any],
    **bind_params: Dict[str, Any]
) -> (Sequence[Any], Dict[str, Any]):
    for invar in invars:
        # if anything is an integer, let's not cast anything.
        if not eqx.is_inexact_array(invar):
            return invars, bind_params
    invars = cast_tree(compute_dtype, invars)
    bind_params = cast_tree(compute_dtype, bind_params)
    bind_params = dict(bind_params)
    if "preferred_element_type" in bind_params:
        bind_params["preferred_element_type"] = compute_dtype
    return invars, bind_params
""",
    ),
    Example(
        JAXAMP,
        "the structure of the state",
        """
class DynamicScalerState(NamedTuple):
    patience: jax.Array = jnp.array(2000) # number of non-inf/NaN iterations to wait before increasing the scaler
    adjust_factor: jax.Array = jnp.array(2.0) # When increasing or decreasing the scaler, multiply or divide by this factor.
    scaler: jax.Array = jnp.array(2**15, dtype=jnp.float32) # current scaler value
    count: jax.Array = jnp.array(0) # number of non-inf/NaN iterations since the scaler was last increased.
""",  # noqa: E501
    ),
    Example(
        JAXAMP,
        "the signature of the gradient function",
        """
def dynamic_scale_value_and_grad(
    fun: Callable,
    *,
    has_aux: bool = False,
    redo_on_nan: bool = 0,
    filter=True,
    **kwargs
):
    \'\'\'
    apply dynamic scalar to the value_and_grad function.

    Args:
        fun: function to differentiate
        has_aux: same meaning as in jax.grad
        redo_on_nan: if the output is nan, we will decrease the scaler
            and recompute this many times. If the output remains nan, give up
            and return it.
        filter: if True, differentiate with equinox.filter_value_and_grad, otherwise use jax.value_and_grad

    Returns:
        grad_fn: a function that behaves like the output of jax.value_and_grad except:
            1. has an extra required keyword argument dynamic_scaler_state
            2. the return value is now a tuple (next_dynamic_scaler_state, (value, grads))
                of (next_dynamic_scaler_state, ((value, aux), grads)) if has_aux=True
    \'\'\'
""",  # noqa: E501
    ),
)
EXAMPLES: Mapping[str, Example] = MappingProxyType({found.title: found for found in _FOUND})
"""The examples by their titles."""

NOT_RUN: Mapping[str, str] = MappingProxyType(
    {
        "baseline of PyTorch": "PyTorch on a CUDA device, without a name of flashoptim-jax",
        "FlashOptim of PyTorch": "PyTorch on a CUDA device: it is the library that was ported",
        "timing in PyTorch": "PyTorch on a CUDA device; the same in JAX is run",
        "Triton via DLPack": "not Python: an argument by position follows one by name",
        "a fused kernel": "not Python: `...` stands for parameters that the page leaves out",
        "one line of the kernel": "two variants of a line of the kernel that is not run",
        "installation": "a command of the shell",
        "the signature of a precision function": "not Python: two parameters with one star",
    }
)
"""Examples that are not run, and why."""
