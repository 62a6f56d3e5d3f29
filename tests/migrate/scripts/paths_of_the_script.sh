SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)
ROOT=$(cd "$SCRIPT_DIR/../.." && pwd)
MODEL_PATH=${MODEL_PATH:-"$HOME/models/Qwen2.5-7B.instruct"}
name=$(basename "$MODEL_PATH")
base=${MODEL_PATH##*/}
CONFIG_PATH=$(basename $(dirname $0))
if [ -z "$1" ]; then CONFIG_NAME="math"; else CONFIG_NAME=$1; fi
export PYTHONPATH=$ROOT:${PYTHONPATH:-}
python "$SCRIPT_DIR/main_grpo.py" --config-path $CONFIG_PATH --config-name $CONFIG_NAME \
  data.path=$PWD/data model.path=$MODEL_PATH name=${name%.*}-${base//./_} short=${base,,} out=`dirname $MODEL_PATH`/out
