"""Entry point of `python -m infinity.cli`, equal to `infinity`."""

from infinity.cli.main import main

if __name__ == "__main__":
    main()
