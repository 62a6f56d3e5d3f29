// English is what is written in the code; here are the Chinese words for it.

const KEY = "corral-language";
const CHINESE = {
  "Runs": "运行列表", "Run": "运行", "State": "状态", "Curve": "曲线", "Held-out score": "验证得分", "Steps": "步数", "Speed": "速度", "Updated": "更新",
  "Filter": "筛选", "Compare": "比较", "There is no run here yet.": "这里还没有运行。", "{} ago": "{} 前", "running": "运行中", "finished": "已完成", "stopped": "已停止",
  "failed": "失败", "empty": "空", "live": "实时", "curves": "曲线", "steps": "各步", "recipe": "配方", "plan": "计划", "logs": "日志", "ledger": "提示账本",
  "step": "步", "Step": "步", "Smoothing": "平滑", "Log axis": "对数轴", "Whole run": "整个运行", "Filter metrics": "筛选指标", "All other metrics": "其他所有指标",
  "Where the time of a step goes": "每步时间的去向", "Nothing was measured yet.": "还没有测量值。", "Reward": "奖励", "Loss": "损失", "Preferences": "偏好", "Entropy": "熵",
  "KL": "KL", "Ratio and mismatch": "比率与失配", "Clipped tokens": "被裁剪的词元", "Gradient norm": "梯度范数", "Length": "长度", "Staleness": "陈旧度",
  "Rewards by name": "各项奖励", "Success": "成功率", "Why samples ended": "样本结束原因", "Samples": "样本", "Tokens per second": "每秒词元数", "Memory and devices": "显存与设备",
  "training": "训练", "validation": "验证", "There is none.": "没有。", "The log is empty.": "日志为空。", "Prompt": "提示", "History of prompt": "提示的历史", "Open": "打开",
  "dropped": "丢弃", "It was never issued.": "从未发出。", "clean": "无误", "not clean": "有问题", "issued": "已发出", "trained": "已训练", "trained_steps": "训练步数", "open": "未结束",
  "reissued": "重新发出", "This run has written no trajectories (logging.trajectories).": "该运行没有写轨迹（logging.trajectories）。", "Seconds per step": "每步秒数",
  "What differs in the recipes": "配方的不同之处", "Nothing but the name.": "只有名称不同。", "Key": "键", "default": "默认", "prompt": "提示", "mean reward": "平均奖励",
  "spread of rewards": "奖励差距", "longest sample": "最长样本", "Sort by": "排序", "as a list": "列表显示", "samples": "样本", "groups": "组", "zero-variance groups": "零方差组",
  "errors": "错误", "Distribution of rewards": "奖励分布", "Distribution": "分布", "more": "更多", "next step": "下一步", "step before": "上一步", "Text in the reply": "回复中的文字",
  "any stop reason": "任意结束原因", "any environment": "任意环境", "trained or not": "是否训练", "reward ≥": "奖励 ≥", "reward ≤": "奖励 ≤", "length ≥": "长度 ≥", "length ≤": "长度 ≤",
  "zero variance": "零方差", "sample": "样本", "reward": "奖励", "tokens": "词元", "stop": "结束原因", "reply": "回复", "row": "行", "generated tokens": "生成的词元", "environment": "环境",
  "conversation": "对话", "tree": "词元树", "side by side": "并排", "Color by": "着色", "Point at a token, or move with the arrow keys.": "指向一个词元，或用方向键移动。",
  "The text of single tokens needs the tokenizer of a checkpoint, which this run does not have yet.": "显示单个词元需要检查点中的分词器，此运行还没有。",
  "log-prob in the engine": "引擎对数概率", "log-prob in the trainer": "训练器对数概率", "ratio trainer / engine": "比率 训练器 / 引擎", "advantage": "优势", "entropy": "熵",
  "version of the weights": "权重版本", "mask: generated or not": "掩码：是否生成", "generated": "生成", "observation": "观察", "turn": "回合", "position": "位置",
  "This group has no other sample.": "该组没有其他样本。", "other sample": "另一个样本", "first difference at position": "首个不同位于", "They are the same.": "二者相同。",
  "next sample": "下一个样本", "sample before": "上一个样本", "next token": "下一个词元", "token before": "上一个词元", "color by the next value": "换一种着色", "this help": "帮助",
  "list of runs": "运行列表", "one level up": "上一级", "dark or light": "深色或浅色", "English or Chinese": "英文或中文", "filter": "筛选", "Keys": "按键", "Close": "关闭",
  "whole curves": "完整曲线", "compare the chosen runs": "比较所选运行", "Token": "令牌", "This server needs its token.": "此服务器需要令牌。", "There is no such page.": "没有这个页面。",
  "Save as": "另存为", "Where you are": "当前位置",
};

export function language() {
  return localStorage.getItem(KEY) ?? (navigator.language.startsWith("zh") ? "zh" : "en");
}

export function setLanguage(name) {
  localStorage.setItem(KEY, name);
}

export function t(text) {
  document.documentElement.lang = language();
  return language() === "zh" ? CHINESE[text] ?? text : text;
}
