"""Define, in one table, which operation runs in which precision."""

import enum
from types import MappingProxyType


class Rule(enum.Enum):
    """How an operation's precision is decided."""

    COMPUTE = "compute"
    """Operands are cast to the compute dtype, and so is the result."""
    FLOAT32 = "float32"
    """Runs in float32: a 16-bit result would overflow, vanish or be visibly rounded."""
    WIDEST = "widest"
    """Runs in the widest dtype of its operands; constants and parameters do not count."""
    FOLLOW = "follow"
    """Moves or compares values and rounds nothing: runs in the dtype of its operands."""
    AS_TRACED = "as traced"
    """Runs as the function was written."""
    ACCUMULATE = "accumulate"
    """A contraction in the compute dtype with a float32 result; chosen only by a user's rule."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The table goes by name and not by primitive: sparse matrices, cuDNN and Pallas need not be
# imported for it, and a name that only some of the supported versions of JAX have does no harm.
# Names that begin with `halfstep_` are our own primitives: a function that has been rewritten
# before may be rewritten again.
_SPARSE = _names(
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general "
    "coo_matvec coo_matmat coo_spmv coo_spmm csr_matvec csr_matmat csr_spmv csr_spmm "
    "bcoo_sum_duplicates bcoo_todense bcsr_todense coo_todense csr_todense todense"
)
_KERNELS = _names(
    "pallas_call ffi_call tpu_custom_call mosaic_gpu_p cudnn_fusion scaled_dot scaled_matmul "
    "scaled_matmul_wrapper rnn_fwd rnn_bwd dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd "
    "dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd "
    "dot_product_attention_fp8_bwd_wrapper call call_exported compute_on noinline vprim "
    "announce_jaxpr stage fused_call mpmd_map custom_lin custom_jvp_call_jaxpr remat_opt "
    "unreachable call_hi_primitive_linearized halfstep_contraction halfstep_linear halfstep_blocks "
    "halfstep_rotation "
    "halfstep_experts halfstep_tangents halfstep_difference halfstep_flash_update"
)
_ROWS = (
    (
        Rule.COMPUTE,
        "contractions, accumulated in float32 by the hardware",
        _names("dot_general conv_general_dilated ragged_dot ragged_dot_general"),
    ),
    (
        Rule.FLOAT32,
        "powers, exponentials, logarithms and roots",
        _names(
            "exp exp2 expm1 log log1p pow integer_pow square sqrt rsqrt cbrt logistic "
            "tanh cumlogsumexp log2 one_minus_square polynomial reciprocal"
        ),
    ),
    (
        Rule.FLOAT32,
        "division (by a number that is written out: as multiplication)",
        _names("div rem"),
    ),
    (
        Rule.FLOAT32,
        "sums and products over many elements, and what combines them",
        _names(
            "reduce_sum reduce_prod cumsum cumprod reduce_window_sum reduce_window reduce "
            "scatter-min scatter-max scatter_min scatter_max scatter-add scatter_add "
            "scatter-mul scatter_mul scatter-sub select_and_scatter select_and_scatter_add "
            "select_and_gather_add psum psum_invariant psum_start psum_invariant_start psum_done "
            "unreduced_psum unreduced_psum_start reduce_scatter reduce_scatter_start "
            "reduce_scatter_done unreduced_reduce_scatter unreduced_reduce_scatter_start"
        ),
    ),
    (
        Rule.FLOAT32,
        "trigonometric and special functions",
        _names(
            "sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erf erfc "
            "erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a "
            "random_gamma_grad bessel_i0e bessel_i1e regularized_incomplete_beta zeta "
            "nextafter"
        ),
    ),
    (
        Rule.FLOAT32,
        "transforms and linear algebra",
        _names(
            "fft cholesky eig eigh hessenberg householder_product lu qr schur svd "
            "symmetric_product triangular_solve tridiagonal tridiagonal_solve geqrf geqp3 "
            "linear_solve cholesky_update ormqr spsolve"
        ),
    ),
    (
        Rule.FLOAT32,
        "products of sparse matrices, which add up in the dtype of their factors",
        _SPARSE,
    ),
    (
        Rule.WIDEST,
        "arithmetic on several operands",
        _names(
            "add sub mul add_any max min clamp select_n concatenate stack pad "
            "dynamic_update_slice scatter eq ne lt le gt ge eq_to le_to lt_to select_if_vmap "
            "maybe_set"
        ),
    ),
    (
        Rule.FOLLOW,
        "movement, comparison and sign",
        _names(
            "reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice "
            "rev gather copy copy_p neg abs sign floor ceil round is_finite stop_gradient "
            "reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin "
            "argmax argmin sort top_k approx_top_k optimization_barrier name "
            "sharding_constraint mesh_cast reshard pvary pcast all_gather "
            "all_gather_invariant all_to_all ppermute pbroadcast pmax pmin device_put "
            "reduce_precision split unstack tile reduce_and reduce_or reduce_xor broadcast_to "
            "all_gather_start all_gather_done all_gather_reduced all_gather_reduced_start "
            "all_to_all_start all_to_all_done ragged_all_to_all ppermute_start ppermute_done "
            "pbroadcast_start pbroadcast_done pbroadcast_dynamic unreduced_pmax unreduced_pmin "
            "preduced reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast "
            "vary_unreduced_cast_p shard_alike layout_constraint relayout "
            "with_memory_space_constraint xla_metadata_value bcoo_extract bcoo_fromdense "
            "bcoo_sort_indices bcoo_transpose bcsr_extract bcsr_fromdense coo_fromdense "
            "csr_fromdense zeros_like nonbatchable nondifferentiable_backward nontraceable "
            "unvmap_max halfstep_settle halfstep_store halfstep_reread halfstep_once "
            "halfstep_apart halfstep_one_of_row halfstep_join"
        ),
    ),
    (
        Rule.AS_TRACED,
        "conversions written by the user, bits and random numbers",
        _names(
            "convert_element_type bitcast_convert_type complex random_bits random_seed "
            "random_split random_wrap random_unwrap random_fold_in random_clone "
            "random_gamma threefry2x32 rng_bit_generator rng_uniform iota empty empty2 "
            "axis_index and or xor not shift_left shift_right_logical "
            "shift_right_arithmetic population_count clz real imag conj debug_callback "
            "debug_print pure_callback io_callback platform_index "
            "call_hi_primitive dimension_size dim_as_value shape_assertion"
        ),
    ),
    (
        Rule.AS_TRACED,
        "mutable arrays and what orders effects",
        _names(
            "new_ref empty_ref free_ref freeze get swap addupdate accum_grad_in_ref pin unpin "
            "create_linear new_variable get_variable set_variable new_box box_get box_set new_log "
            "log_read log_extend create_token after_all dce_sink tie program_order check "
            "inspect_sharding buffer_callback psend precv consume assert_consumed_value"
        ),
    ),
    (
        Rule.AS_TRACED,
        "kernels, products in formats of their own, and functions that run as they are written",
        _KERNELS,
    ),
    (
        Rule.AS_TRACED,
        "integers, keys and what tells hosts apart",
        _names(
            "lu_pivots_to_permutation mulhi threefry4x32 philox2x32 philox4x32 iota_2x32_shape "
            "to_edtype from_edtype unvmap_all unvmap_any global_array_to_host_local_array "
            "host_local_array_to_global_array"
        ),
    ),
)

TABLE = MappingProxyType({name: rule for rule, _, names in _ROWS for name in names})
"""The rule of every known primitive."""

CONTRACTIONS = frozenset(name for name, rule in TABLE.items() if rule is Rule.COMPUTE)
"""The names of dots and convolutions."""

GROUPS = tuple((rule, why, names) for rule, why, names in _ROWS)
"""The same table, as it is shown in the documentation."""

# These are fewer than FOLLOW has: `floor` of a rounded number can be another number, and `argmax`
# and `sort` order numbers differently once rounding has made them equal.
PASSING = frozenset(
    _names(
        "reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice rev gather "
        "copy copy_p neg abs stop_gradient reduce_max reduce_min reduce_window_max "
        "reduce_window_min cummax cummin optimization_barrier name sharding_constraint mesh_cast "
        "reshard pvary pcast all_gather all_gather_invariant all_to_all ppermute pbroadcast pmax "
        "pmin device_put split unstack tile broadcast_to select_n concatenate stack pad "
        "dynamic_update_slice scatter max min clamp halfstep_settle halfstep_store halfstep_reread "
        "halfstep_once halfstep_apart halfstep_one_of_row"
    )
)
"""Operations that hand values on: rounding before or after them gives the same result."""

DEAR = frozenset({*_SPARSE, *_KERNELS})
"""Operations that are not contractions of JAX's own, but as expensive to recompute."""

COLLECTIVES = frozenset(
    _names(
        "psum psum_invariant psum_start psum_invariant_start psum_done unreduced_psum "
        "unreduced_psum_start pmax pmin unreduced_pmax unreduced_pmin all_gather "
        "all_gather_invariant all_gather_reduced all_gather_start all_gather_reduced_start "
        "all_gather_done all_to_all all_to_all_start all_to_all_done ragged_all_to_all ppermute "
        "ppermute_start ppermute_done pbroadcast pbroadcast_start pbroadcast_done "
        "pbroadcast_dynamic psend precv reduce_scatter reduce_scatter_start reduce_scatter_done "
        "unreduced_reduce_scatter unreduced_reduce_scatter_start"
    )
)
"""Communication, which is never repeated."""
