"""`python -m benchmarks.gpu`."""

from benchmarks.gpu.run import main

if __name__ == "__main__":
    main()
