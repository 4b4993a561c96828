"""usage: coverage json -o - | branch_coverage.py PERCENT. Exit status 1 if fewer of the branches were taken; lines do not count."""

import json
import sys

totals = json.load(sys.stdin)["totals"]
share = 100 * totals["covered_branches"] / totals["num_branches"]
print(f"branches: {totals['covered_branches']} of {totals['num_branches']}, {share:.2f} %")
sys.exit(share <= float(sys.argv[1]))
