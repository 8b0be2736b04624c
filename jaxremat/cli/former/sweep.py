"""`python -m jaxremat.sweep`, the former name of `jaxremat sweep`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("sweep")
