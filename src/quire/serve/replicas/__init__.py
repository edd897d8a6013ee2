"""The engine processes behind one API process: routing, fairness, failures and sums over all of them."""
