"""`python -m jaxremat.explain`, the former name of `jaxremat explain`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("explain")
