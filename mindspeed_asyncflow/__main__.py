"""`python -m mindspeed_asyncflow` is the `asyncflow` command."""

from mindspeed_asyncflow.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
