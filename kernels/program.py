"""What runs when a file of kernels/ is run, as `python kernels/ag_gemm.py` or `-m kernels.ag_gemm`.

The file hands over here before it defines a kernel: cases.py, which knows all steps, imports it
under the module name that its records carry. So no step knows cases.py.
"""

import sys
from pathlib import Path

import __main__

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels.cases import main

sys.argv[0] = str(__main__.__file__)  # the help's own name for it
sys.exit(main(Path(sys.argv[0]).stem))
