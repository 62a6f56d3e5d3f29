"""Chinese next to the English of the plan, of migrate's report and of the errors that a newcomer meets, where the
locale is Chinese.

Texts are made all over Corral, most of them with numbers and names in them. Here are those that have a Chinese one, by
their English; the command line passes what it prints through `add_chinese`. English stays, so what people search for
and what the pages quote is the same everywhere; what no entry fits has English alone, and so has `--help`.
"""

import re
from collections.abc import Mapping
from functools import cache

TITLES = {
    "data": "数据",
    "reward": "奖励",
    "batch": "批次",
    "schedule": "训练安排",
    "algorithm": "算法",
    "placement": "设备放置",
    "memory per device, estimated": "每个设备的显存，估计值",
    "memory": "显存",
    "links": "每步经链路传输的字节数，估计值",
    "warnings": "警告",
    "services": "服务",
    "checked": "已检查",
    "changes the training, or needs a decision": "会改变训练，或需要你决定",
    "look at these": "请留意",
    "mapped": "直接对应",
    "converted": "经过换算",
    "built in": "Corral 本来如此，或自行决定",
    "without effect there, and so here": "在原系统里不起作用，这里也一样",
    "unsupported": "不支持",
    "besides, {}'s defaults": "此外：原系统的默认值",
    "{}: {} keys": "键的总数与各类数目",
    "{}: no keys": "没有键",
    "`--all` lists every key": "`--all` 列出每个键",
    "there is no recipe": "没有得到配方，原因",
}
"""Beginnings of lines that have no indentation."""

SENTENCES = {
    # the plan
    "synchronous: rollout of a step": "同步：先完成一步的 rollout，再训练，再开始下一步的 rollout",
    "pipelined: finished samples are": "流水：完成的样本随到随处理；下一步等新权重",
    "async: rollout up to": "异步：rollout 可以领先训练，由重要性采样修正（除非写明不修正）",
    "supervised: trained on": "监督训练：用数据里的回答训练，不做 rollout",
    "how many steps that is depends on its number of rows": "训练多少步取决于数据的行数",
    "is not on this machine, and a plan downloads nothing": "本机没有这个模型，规划不下载：有 config.json 即可估计显存",
    "nothing travels, the engine decodes with the trainer's own tensors": "不传输权重：引擎直接使用训练器的张量",
    "a plan that does not fit is an error": "写上 `cluster.device_memory`，放不下的规划就会报错",
    "is unusually high; 1e-6 to 1e-4 is common": "学习率过高，通常为 1e-6 到 1e-4",
    "do not divide into {} updates": "不能整除更新次数：最后几次更新会少一个",
    "samples from a truncated distribution": "采样分布被截断，而对数概率是完整分布的，样本略微 off-policy",
    "which compares the samples of a prompt: all advantages are zero": "每个提示只有一个样本，优势全为零：请增加样本数",
    "is more than the {} steps of the run": "间隔大于总步数，不会发生",
    # installation
    "this needs Ray": "需要 Ray：请安装附加依赖 `cluster`",
    "needs an extra: ": "缺少附加依赖，请执行提示中的命令",
    "needs Linux, and this is": "集群只能在 Linux 上运行：请到集群的节点上执行",
    "was built for CUDA {}, and the driver": "驱动比 torch 旧：请升级驱动，或安装面向旧 CUDA 的 torch",
    "without code for": "torch 不支持这种 GPU：V100（sm_70）请安装 cu126 的 wheel",
    "finds no GPU:": "torch 找不到 GPU：检查驱动、CUDA_VISIBLE_DEVICES，以及容器是否加了 --gpus all",
    "this Python has no {} (": "这个 Python 没有安装该引擎：请安装，或用 `rollout.engine.python` 指明装有它的环境",
    # a cluster
    "which node is this? Set RANK": "不知道这是哪个节点：请设置 RANK（0 为头节点）",
    "is not below the number of nodes": "节点编号不小于节点数：两者都以节点计，从 0 开始，不以进程计",
    "where is the head? Set MASTER_ADDR": "不知道头节点在哪：请设置 MASTER_ADDR，或用 --join、--head-file",
    "the head was not there within {} s": "头节点未就绪：查看它的输出，并检查节点间的网络和防火墙",
    "the name {} is unknown on this node": "本节点无法解析主机名 {0}：请改用地址",
    "needs a token and this node has none": "需要令牌：请复制头节点的 ~/.corral/token，或设置 RAY_AUTH_TOKEN",
    "this node does not fit the head": "与头节点的版本不同：请在各节点安装相同的版本",
    "port {} of this node is in use": "端口 {0} 已被占用：请在所有节点上换一个 --port",
    "another Ray runs on this node": "本节点已有另一个 Ray：结束它，或加 --beside 和另一个 --port",
    "this node is {} of the cluster at {} already": "本节点已经在集群 {1} 中：先执行 `corral down`",
    "has several networks, and no default route says which": "有多个网络，无法确定用哪个：请用 --address 指定",
    "the cluster lacks {}": "节点没有到齐：请在缺少的节点上执行 `corral up`",
    "it is stale:": "头节点地址文件已过期：删除它，或换一个 --id",
    "refuses this token": "令牌不符：请复制头节点的 ~/.corral/token",
    "the dashboard listens on the loopback of the head node": "仪表盘只在头节点本机监听：请在头节点上执行，或转发端口",
    # before training
    "`{}` is not a key; did you mean `{}`?": "没有 `{0}` 这个键；你要写的可能是 `{1}`",
    "`{}` is not a key": "没有 `{0}` 这个键",
    "`{}` has no effect": "`{0}` 在这份配方里不起作用：删掉它，或打开它所属的功能",
    "`{}`: {} should be": "`{0}` 的值类型或范围不对",
    "`{}`: {} is not one of": "`{0}` 不能取 {1}",
    "is not valid YAML": "不是合法的 YAML：检查缩进、引号，以及全角逗号和冒号",
    "could not be loaded:": "无法载入：检查名字；连不上 hub 时用本地文件夹、HF_ENDPOINT 镜像或缓存",
    "is a folder without config.json": "文件夹里没有 config.json，不是 Hugging Face 格式的模型",
    "no column `{}`": "数据里没有 `{0}` 这一列：请设置对应的键",
    "tokenizer has no chat template": "分词器没有对话模板：设 `data.chat: false`，或给出 `model.chat_template`",
    "chat template changes earlier turns": "对话模板会改写之前的轮次：请用 `model.chat_template` 给一个只追加的模板",
    "prompts have more tokens than data.max_prompt_tokens": "有提示超过最大长度：调大上限，或设 `data.overlong`",
    "there is no reward `{}`": "没有名为 `{0}` 的奖励",
    "the Ray cluster is too small": "集群的节点或设备不够：见 `corral status`",
    "devices of the Ray cluster were not free within": "设备被其他运行占用，等待超时",
    "did not all connect to {} and to each other": "worker 之间没有全部连通：检查防火墙和 NCCL_SOCKET_IFNAME",
    "could not start; is Corral installed there?": "该节点上无法启动 worker：是否安装了 Corral？",
    "was not ready at {} within {} s": "服务没有在时限内就绪：调大 `start_timeout_s`，或查看它的日志",
    "something else answers at {} already": "端口已有别的程序应答：结束它，或换端口",
    "there is too little memory": "内存或显存不足：减小 `batch.max_tokens_per_micro_batch`，打开梯度检查点或卸载",
    "is not a folder": "没有这个文件夹",
    "is unsupported:": "Corral 不支持这个键",
}
"""Parts of lines, with `{}` for what differs; the first that is in a line counts."""


def is_chinese(environment: Mapping[str, str]) -> bool:
    """Whether the messages of programs are to be Chinese, by the variables that all programs read."""
    chosen = (environment.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return next((name for name in chosen if name), "").startswith("zh")


def add_chinese(text: str, environment: Mapping[str, str]) -> str:
    """The text with Chinese behind its titles, and in lines of their own below its sentences."""
    return "\n".join(map(add_to_line, text.splitlines())) if is_chinese(environment) else text


def add_to_line(line: str) -> str:
    if not line.startswith((" ", "error: ", "warning: ")):
        title = next((chinese for pattern, chinese in titles() if pattern.match(line)), None)
        return line if title is None else f"{line}  （{title}）"
    for pattern, chinese in sentences():
        if found := pattern.search(line):
            return f"{line}\n    {chinese.format(*found.groups())}"
    return line


@cache
def titles() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(f"{as_pattern(english)}(?=$|[:, ])"), chinese) for english, chinese in TITLES.items()]


@cache
def sentences() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(as_pattern(english)), chinese) for english, chinese in SENTENCES.items()]


def as_pattern(english: str) -> str:
    return "(.+?)".join(map(re.escape, english.split("{}")))
