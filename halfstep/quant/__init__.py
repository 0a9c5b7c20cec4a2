"""Store arrays in low precision: split weights, codes with scales, and stochastic rounding.

The compressed optimizers of `halfstep.optim` store their state with these functions.
"""

from halfstep.quant._array import (
    Quantized as Quantized,
    dequantize as dequantize,
    quantize as quantize,
)
from halfstep.quant._codes import CODES as CODES, Code as Code
from halfstep.quant._groups import Groups as Groups, groups_for as groups_for
from halfstep.quant._split import join as join, split as split
from halfstep.quant._stochastic import stochastic_round as stochastic_round
