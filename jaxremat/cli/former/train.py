"""`python -m jaxremat.train`, the former name of `jaxremat train`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("train")
