"""Secure aggregation: the coordinator learns each block's sum over several sites, and no site's own update.

`terms` what senders and helpers of a round agree on · `keys` signatures and sealed messages · `masks` random masks
from seeds · `masked_update` an update as masked integers · `envelope` what a site signs and seals with it ·
`committee` the rules of the helpers, who open sums · `opened` the mean of an opened sum. Depends on `shared`:
hashing, model, schema, tensors, updates.
"""
