"""The kernels: one module per family, of kernels, plans and launchers, in torch, Triton and NumPy alone.

Nothing here imports anything else of Fusebook, and modules import each other by relative names: the folder can be
copied into another project as it stands. What a module's ``__all__`` names is public, as ``fusebook.<name>``.
"""
