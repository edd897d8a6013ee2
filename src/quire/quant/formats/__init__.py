"""Readers of weight formats: from the tensors of a checkpoint to the forms of quant/forms.py."""
