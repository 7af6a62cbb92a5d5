"""`python -m benchmarks.gpu`, of an installed kvatlas or of the sources beside this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "src"))

if __name__ == "__main__":
    try:
        from benchmarks.gpu.run import main
    except ModuleNotFoundError as error:
        sys.exit(f"No module {error.name}: this needs torch, triton, numpy and msgspec.")
    main()
