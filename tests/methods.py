"""Every method, one line each; the whole contract runs on it."""

import steppe

METHODS = {
    "sgd": steppe.sgd(),
    "rwp": steppe.rwp(0.02),
    "rwp default": steppe.rwp(),
    "rwp ratio": steppe.rwp(ratio=0.3),
    "rwp isotropic": steppe.rwp(0.01, isotropic=True),
    "rwp schedule": steppe.rwp(steppe.cosine_increase(0.01, 0.05, steps=5)),
    "arwp": steppe.arwp(0.02, eta=10.0),
    "arwp released exponent": steppe.arwp(0.02, eta=10.0, exponent=0.5),
    "arwp elementwise": steppe.arwp(0.02, eta=10.0, elementwise=True),
    "m_rwp": steppe.m_rwp(0.02),
    "m_rwp lam": steppe.m_rwp(0.02, lam=0.3),
    "m_rwp same batch": steppe.m_rwp(0.02, same_batch=True),
    "m_arwp": steppe.m_arwp(0.02, eta=10.0),
    "m_arwp elementwise": steppe.m_arwp(0.02, eta=10.0, elementwise=True, lam=0.7),
    "mixed msam": steppe.mixed(steppe.msam(0.5), 0.4),
    "sam": steppe.sam(0.1),
    "sam m": steppe.sam(0.1, m=6),
    "sam different batches": steppe.sam(0.1, same_batch=False),
    "asam": steppe.asam(0.5),
    "lpf_sgd": steppe.lpf_sgd(0.02, samples=4),
    "antithetic_rwp": steppe.antithetic_rwp(0.02),
    "msam": steppe.msam(0.5),
    "rwp rise": steppe.rwp(rise=0.05),
    "arwp rise": steppe.arwp(rise=steppe.constant(0.05)),
    "m_arwp rise": steppe.m_arwp(rise=steppe.constant(0.05)),
    "sam rise": steppe.sam(rise=steppe.constant(0.05)),
}
