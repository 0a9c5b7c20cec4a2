"""Provide the basics of all other modules: formats, trees, calls, display, and JAX's programs."""

from halfstep._base.arguments import (
    check_fields as check_fields,
    check_share as check_share,
    checked as checked,
    checked_but as checked_but,
    described as described,
)
from halfstep._base.calls import (
    Arguments as Arguments,
    FlatCall as FlatCall,
    argument_names as argument_names,
    listed as listed,
)
from halfstep._base.digest import (
    device_sums as device_sums,
    digests as digests,
    prepare_digests as prepare_digests,
)
from halfstep._base.display import (
    Progress as Progress,
    Report as Report,
    figure_of as figure_of,
    type_of as type_of,
    with_values as with_values,
)
from halfstep._base.formats import (
    FORMATS as FORMATS,
    DTypeLike as DTypeLike,
    Format as Format,
    at_least_float32 as at_least_float32,
    dtype_name as dtype_name,
    half_dtype as half_dtype,
    half_precision as half_precision,
    parse_dtype as parse_dtype,
    widest as widest,
)
from halfstep._base.jaxprs import (
    ClosedJaxpr as ClosedJaxpr,
    closed as closed,
    jaxprs_in as jaxprs_in,
    varying_axes as varying_axes,
)
from halfstep._base.options import (
    check_options as check_options,
    option_names as option_names,
    parameters_of as parameters_of,
    refusing as refusing,
)
from halfstep._base.private_jax import (
    NAME_PRIMITIVE as NAME_PRIMITIVE,
    OWN_FOLDER as OWN_FOLDER,
    Traceback as Traceback,
    answer_partitioner as answer_partitioner,
    define_split as define_split,
    is_compiling as is_compiling,
    lines_of_backward_functions as lines_of_backward_functions,
)
from halfstep._base.processes import (
    agree as agree,
    first_says as first_says,
    gather_texts as gather_texts,
    wait_for_all as wait_for_all,
)
from halfstep._base.rounding import (
    NAME as NAME,
    Rounding as Rounding,
    cast as cast,
    representable as representable,
    settled as settled,
    widened as widened,
)
from halfstep._base.sealed_folder import (
    SHA256 as SHA256,
    DamagedFolderError as DamagedFolderError,
    Hashing as Hashing,
    check_files as check_files,
    check_nothing_added as check_nothing_added,
    flush as flush,
    flush_one as flush_one,
    hash_text as hash_text,
    is_in_file_system as is_in_file_system,
    read_json as read_json,
    read_text as read_text,
    regular_file as regular_file,
    seal as seal,
    sealed_files as sealed_files,
)
from halfstep._base.trees import (
    MarkedLeaf as MarkedLeaf,
    Shaped as Shaped,
    compile_rule as compile_rule,
    is_array as is_array,
    is_inexact as is_inexact,
    is_key as is_key,
    is_state_node as is_state_node,
    marked_leaves as marked_leaves,
    match_rules as match_rules,
    path_string as path_string,
    without_key_type as without_key_type,
)
from halfstep._base.versions import (
    TESTED_JAX as TESTED_JAX,
    TESTED_PYTHON as TESTED_PYTHON,
    known_to_work as known_to_work,
)
from halfstep._text import (
    ABSENT as ABSENT,
    aligned as aligned,
    flops as flops,
    html_table as html_table,
    number_of as number_of,
    percent as percent,
    seconds as seconds,
    shortened as shortened,
    size as size,
    wrapped as wrapped,
)
