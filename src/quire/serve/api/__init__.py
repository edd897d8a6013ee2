"""The routes, one module or sub-package per API: what requests mean and how answers are told."""
