"""Arrays in few bits: split weights, codes with scales, and stochastic rounding.

What the compressed optimizers of `halfstep.optim` store is made of these.
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
