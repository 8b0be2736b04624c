"""`python -m jaxremat.doctor`, the former name of `jaxremat doctor`. For version 0.2."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("doctor")
