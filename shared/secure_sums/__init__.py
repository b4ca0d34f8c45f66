"""Secure aggregation: the coordinator learns each block's sum over several sites, and no site's own update.

`messages` what parties agree on, sign and send · `keys` signatures and sealed messages · `roster` checks of other
sites' keys and of a round's terms · `masks` random masks from seeds · `masked_update` an update as masked integers ·
`noisy_update` an update within a norm, with noise · `envelope` what a site signs and seals with it · `committee` the
rules of the helpers, who open sums · `opened` the mean of an opened sum.

Imports `model`, `privacy`, `tensors` and `updates`.
"""
