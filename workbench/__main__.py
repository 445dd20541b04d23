"""`python -m workbench COMMAND`: for people without a notebook."""

import sys

from workbench.client.cli import parse


def main(arguments: list[str] | None = None) -> int:
    """Carries out one command; returns the process' exit status."""
    options = parse(arguments)
    try:
        status: int = options.carry_out(options)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"interrupted{f': {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
