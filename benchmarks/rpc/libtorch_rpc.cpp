#include "libtorch_rpc.h"

#include <stdexcept>

#ifdef USE_TENSORPIPE

#include <torch/csrc/distributed/autograd/autograd.h>
#include <torch/csrc/distributed/autograd/context/container.h>
#include <torch/csrc/distributed/autograd/utils.h>
#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/rref_context.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/distributed/rpc/script_resp.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>
#include <torch/csrc/jit/frontend/script_type_parser.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <optional>
#include <vector>

namespace dist_autograd = torch::distributed::autograd;
namespace rpc = torch::distributed::rpc;

namespace {

using Reply = c10::intrusive_ptr<c10::ivalue::Future>;

std::shared_ptr<torch::jit::Operator> find_operator(const char* name, const std::string& overload) {
  for (const auto& found : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (found->schema().overload_name() == overload) return found;
  }
  throw std::runtime_error(std::string("LibTorch has no operator ") + name);
}

c10::IValue value_of(const Reply& reply) {
  reply->waitAndThrow();
  const auto message = reply->value().toCustomClass<rpc::Message>();
  auto type = message->type();
  const auto response = rpc::deserializeResponse(*message, type);
  return static_cast<rpc::ScriptResp&>(*response).value();
}

rpc::TensorPipeRpcBackendOptions options_of(const std::string& transports) {
  std::optional<std::vector<std::string>> links, channels;
  if (transports == "tcp") {
    links = {"uv"};
    channels = {"basic"};
  }
  return {16, links, channels, 60, "env://"};
}

}  // namespace

struct LibtorchRpc::Impl {
  std::shared_ptr<rpc::TensorPipeAgent> agent;
  std::shared_ptr<torch::jit::Operator> add = find_operator("aten::add", "int"),
                                        multiply = find_operator("aten::mul", "Tensor"),
                                        alias = find_operator("aten::alias", "");

  auto message(const std::shared_ptr<torch::jit::Operator>& called, std::vector<c10::IValue> arguments) {
    return std::move(rpc::ScriptCall(called, std::move(arguments))).toMessage();
  }
  Reply send(const std::shared_ptr<torch::jit::Operator>& called, std::vector<c10::IValue> arguments) {
    return agent->send(agent->getWorkerInfo("w1"), message(called, std::move(arguments)));
  }
};

bool LibtorchRpc::is_there() {
  return true;
}

LibtorchRpc::LibtorchRpc(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                         const std::string& transports)
    : impl_(std::make_unique<Impl>()) {
  setenv("TP_SOCKET_IFNAME", "lo", 0);
  FLAGS_caffe2_log_level = 2;  // it warns of the end of the other process
  impl_->agent = std::make_shared<rpc::TensorPipeAgent>(
      store, "w" + std::to_string(rank), rank, 2, options_of(transports),
      std::unordered_map<std::string, rpc::DeviceMap>{}, std::vector<c10::Device>{},
      std::make_unique<rpc::RequestCallbackNoPython>());
  impl_->agent->setTypeResolver(std::make_shared<rpc::TypeResolver>([](const c10::QualifiedName& name) {
    return c10::StrongTypePtr(nullptr, torch::jit::ScriptTypeParser().parseType(name.qualifiedName()));
  }));
  rpc::RpcAgent::setCurrentRpcAgent(impl_->agent);
  dist_autograd::DistAutogradContainer::init(static_cast<int64_t>(rank));
  impl_->agent->start();
}

// The process ends without destructors after it: LibTorch's agent cannot be destroyed safely at exit.
LibtorchRpc::~LibtorchRpc() = default;

void LibtorchRpc::add_integers() {
  value_of(impl_->send(impl_->add, {1, 2}));
}

void LibtorchRpc::add_integers_in_burst(int calls) {
  std::vector<Reply> replies;
  for (int i = 0; i < calls; ++i) replies.push_back(impl_->send(impl_->add, {1, 2}));
  for (const Reply& reply : replies) value_of(reply);
}

at::Tensor LibtorchRpc::echo(const at::Tensor& x) {
  return value_of(impl_->send(impl_->alias, {x})).toTensor();
}

at::Tensor LibtorchRpc::step(const at::Tensor& x, const at::Tensor& y) {
  auto& contexts = dist_autograd::DistAutogradContainer::getInstance();
  const auto context = contexts.newContext();
  const Reply reply = dist_autograd::sendMessageWithAutograd(*impl_->agent, impl_->agent->getWorkerInfo("w1"),
                                                             impl_->message(impl_->multiply, {x, y}), false);
  dist_autograd::backward(context->contextId(), {value_of(reply).toTensor().sum()}, false);
  at::Tensor gradient = context->getGradients().at(x);
  contexts.releaseContext(context->contextId());
  return gradient;
}

void LibtorchRpc::shutdown() {
  impl_->agent->join(false, 0);
  impl_->agent->shutdown();
  rpc::RRefContext::getInstance().destroyInstance(false);
}

#else

struct LibtorchRpc::Impl {};
bool LibtorchRpc::is_there() {
  return false;
}
LibtorchRpc::LibtorchRpc(const c10::intrusive_ptr<c10d::Store>&, int, const std::string&) {
  throw std::runtime_error("this LibTorch has no RPC");
}
LibtorchRpc::~LibtorchRpc() = default;
void LibtorchRpc::add_integers() {}
void LibtorchRpc::add_integers_in_burst(int) {}
at::Tensor LibtorchRpc::echo(const at::Tensor& x) {
  return x;
}
at::Tensor LibtorchRpc::step(const at::Tensor& x, const at::Tensor&) {
  return x;
}
void LibtorchRpc::shutdown() {}

#endif
