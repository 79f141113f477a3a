"""The kernels: one module per family, of kernels, plans and launchers, in torch, Triton and NumPy alone.

Nothing here imports anything else of Fusebook, and modules import each other by relative names: the folder can be
copied into another project as it is. Names in a module's ``__all__`` are public: ``fusebook/__init__.py`` imports
them.
"""
