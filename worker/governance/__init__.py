"""A site's own rules: policy, approvals, the airlock, opening hours and the terms of each run. Imports `state`."""
