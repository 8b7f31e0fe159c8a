"""qtool: which precision, on which hardware, to deploy a Hugging Face model, with evidence."""

__version__ = "0.1.0"
