"""The command line, `headrace`: start the parts, ask, look, repair."""

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit; Ctrl-C while it is still being loaded ends it without a word."""
    try:
        from headrace.cli import app

        app.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
