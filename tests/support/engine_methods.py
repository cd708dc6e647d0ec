"""The methods and sums of methods that give the same numbers on every engine, with options that act in few rounds."""

from support.federations import LORA, QUICK
from unskew.methods.registry import METHODS, rule_class
from unskew.protocol.method import class_slots

SUMS = [
    "fedbuff:buffer_size=2+scaffold",
    "feddle:epochs=2,batch=5+fedprox",
    "ca2fl:buffer_size=2+fedprox",
    "feddf:epochs=1,batch=5+moon",
    "fedals:alpha=2+fedprox",
    "fedals:auto,longest=2,budget=0.9",
    "fedprox:mu=0.1+scaffold",
    "scaffold+fedavgm",
    "scaffold:option=I",
    "scaffold:variate=mean",
    "scaffold:eta_g=0.5",
    "fedprox+fedadam",
    "fedcog:start_round=1,n=6,g_steps=2,lambda_kd=1,generator=network",
    "fedcog:start_round=1,n=6,g_steps=2,lambda_kd=1,augment=true,labels=explicit,explicit=0;2",
    "vhl:source=style,per_class=9,virtual_batch=10,align_epochs=1+moon",
    "fedgen:beta_s=0.1,labels=all+fedavgm",
    "fedrep:head_share=0.3+fedprox",
    "scaffold+ft",
    "fedcog:start_round=1,n=8,g_steps=3+ft",
    "ifca:groups=3,blocks=true",
    "fedrep+ft",
]

EARLY = {
    **QUICK,
    "fedbuff": "fedbuff:buffer_size=4",
    "ca2fl": "ca2fl:buffer_size=4",
    "fedals": "fedals:alpha=2",
    "fedcog": "fedcog:start_round=1,n=6,g_steps=2",
    "fedcog-authors": "fedcog-authors:start_round=1,n=6,g_steps=2",
}
"""Methods whose defaults would do nothing in so short a run, or take too long."""

# What only changes the data before training needs images of 8 bits, and others a model with LoRA factors; their own tests run
# them on every engine.
ALL_METHODS = [name for name in METHODS if class_slots(rule_class(name)) != ["data"] and name not in LORA]
