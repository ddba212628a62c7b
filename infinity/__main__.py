"""Entry point of `python -m infinity`, equal to the command `infinity`."""

from infinity.cli.main import main

if __name__ == "__main__":
    main(name="python -m infinity")
