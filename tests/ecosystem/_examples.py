"""All programs."""

from tests.ecosystem._frameworks import FRAMEWORKS
from tests.ecosystem._models import MODELS
from tests.ecosystem._science import SCIENCE

EXAMPLES = {**SCIENCE.examples, **MODELS.examples, **FRAMEWORKS.examples}
