"""``python -m fusebook.tune concat_gemm``."""

from fusebook.tune import main

raise SystemExit(main())
