"""`python -m infinity` is the same as `infinity`."""

from infinity.cli.main import main

if __name__ == "__main__":
    main(name="python -m infinity")
