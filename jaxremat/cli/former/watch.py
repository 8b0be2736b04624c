"""`python -m jaxremat.watch`, the former name of `jaxremat watch`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("watch")
