"""What halfstep's claims are measured with: `python -m benchmarks`."""

import os
import sys

PEERS = "HALFSTEP_PEERS"
"""The environment variable in which `python -m benchmarks` names folders of other libraries."""
# Behind all that is installed: they bring themselves, and nothing that is here in another version.
sys.path.extend(folder for folder in os.environ.get(PEERS, "").split(os.pathsep) if folder)
