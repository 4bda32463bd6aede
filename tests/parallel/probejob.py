import torch
from tests.parallel import stock_model as S
def job(spec, folder, tokens, loads, saves, out):
    res=[]
    for par in loads:
        with S.groups(par):
            [m]=S.chunks(spec,par); S.load([m],folder); res.append(S.logits(m,tokens))
    for i,par in enumerate(saves):
        with S.groups(par):
            ms=S.chunks(spec,par); S.load(ms,folder); S.save(ms,out/f"saved{i}")
    return res
