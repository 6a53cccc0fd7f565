// Backward nodes recorded by hooks in C++: the same events as the Python hooks of record/engine.py, in the same
// shard, without Python wrappers of nodes and without the interpreter's lock.
//
// What holds everywhere here: a hook changes no gradient and throws nothing; it holds no tensor beyond its node; hooks
// are taken out when the backward has ended. Slow paths (a full segment, a new thread, a new name) go through Python.

#include <pybind11/pybind11.h>
#include <time.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <typeindex>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);  // a std::shared_ptr before torch 2.12

namespace {

#pragma pack(push, 1)
struct Record {  // schema.RECORD
  int64_t t, seq, a, b;
  uint32_t step, name, module;
  uint16_t thread, kind;
};
#pragma pack(pop)
static_assert(sizeof(Record) == 48, "schema.RECORD has 48 bytes");

constexpr size_t kMaxNodes = 8'000'000;
constexpr size_t kSpare = 16;
constexpr uint64_t kNoSequence = UINT64_MAX;  // of AccumulateGrad

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// A few instructions long each time, so nobody sleeps in it, and nobody waits for the interpreter while holding it.
class Spin {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

// A mapped segment of the shard and its next free offset, shared with the writer in Python.
class Segment {
 public:
  Segment(const py::object& buffer, int64_t start) : next_(start) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_WRITABLE) != 0) throw py::error_already_set();
  }
  ~Segment() { PyBuffer_Release(&view_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int64_t take() { return next_.fetch_add(sizeof(Record), std::memory_order_relaxed); }
  int64_t offset() const { return next_.load(std::memory_order_relaxed); }
  char* base() const { return static_cast<char*>(view_.buf); }
  int64_t end() const { return view_.len; }

 private:
  Py_buffer view_{};
  std::atomic<int64_t> next_;
};

struct ThreadNumber {
  uint64_t writer = 0;
  uint16_t number = 0;
};
thread_local ThreadNumber this_thread;
std::atomic<uint64_t> writers{0};

// Appends records to the segment in use. ``slow(kind, name, module, seq, a, b)`` is the writer in Python, which changes
// segments and stops; ``thread_number(ident)`` numbers threads.
class Writer {
 public:
  Writer(py::object slow, py::object thread_number)
      : id_(++writers), slow_(std::move(slow)), thread_number_(std::move(thread_number)) {}

  void set_step(uint32_t step) { step_.store(step, std::memory_order_relaxed); }

  // With the interpreter's lock held. A segment goes only when no thread is writing to it.
  void set_segment(std::shared_ptr<Segment> segment) {
    current_.store(segment.get(), std::memory_order_seq_cst);
    if (owner_) retired_.push_back(std::move(owner_));
    owner_ = std::move(segment);
    if (inflight_.load(std::memory_order_seq_cst) == 0) retired_.clear();
  }

  void emit(uint16_t kind, uint32_t name, uint32_t module, int64_t seq, int64_t a, int64_t b) noexcept {
    if (this_thread.writer != id_ && !number_thread()) return;
    if (!put(kind, name, module, seq, a, b)) slowly(kind, name, module, seq, a, b);
  }

 private:
  bool put(uint16_t kind, uint32_t name, uint32_t module, int64_t seq, int64_t a, int64_t b) noexcept {
    inflight_.fetch_add(1, std::memory_order_seq_cst);
    Segment* segment = current_.load(std::memory_order_seq_cst);
    bool done = false;
    if (segment != nullptr) {
      const int64_t offset = segment->take();
      if (offset + int64_t(sizeof(Record)) <= segment->end()) {
        const Record record{now_ns(), seq, a, b, step_.load(std::memory_order_relaxed), name, module,
                            this_thread.number, 0};
        char* at = segment->base() + offset;
        std::memcpy(at, &record, sizeof(Record) - sizeof(uint16_t));
        // The kind commits the record: it is stored last.
        __atomic_store_n(reinterpret_cast<uint16_t*>(at + sizeof(Record) - sizeof(uint16_t)), kind, __ATOMIC_RELEASE);
        done = true;
      }
    }
    inflight_.fetch_sub(1, std::memory_order_seq_cst);
    return done;
  }

  bool number_thread() noexcept {
    if (finalizing()) return false;
    py::gil_scoped_acquire lock;
    try {
      this_thread.number = thread_number_(py::int_(uint64_t(PyThread_get_thread_ident()))).cast<uint16_t>();
      this_thread.writer = id_;
      return true;
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("distdbg");
    } catch (...) {
    }
    return false;
  }

  void slowly(uint16_t kind, uint32_t name, uint32_t module, int64_t seq, int64_t a, int64_t b) noexcept {
    if (finalizing()) return;
    py::gil_scoped_acquire lock;
    py::error_scope around;  // whatever exception is under way stays as it is
    try {
      slow_(kind, name, module, seq, a, b);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("distdbg");
    } catch (...) {
    }
  }

  const uint64_t id_;
  py::object slow_, thread_number_;
  std::atomic<Segment*> current_{nullptr};
  std::atomic<int> inflight_{0};
  std::atomic<uint32_t> step_{0};
  std::shared_ptr<Segment> owner_;
  std::vector<std::shared_ptr<Segment>> retired_;

 public:
  std::unordered_map<std::type_index, uint32_t> names;  // of C++ nodes, by class
  std::unordered_map<PyTypeObject*, std::pair<py::object, uint32_t>> python_names;  // of custom Functions
};

struct Kinds {
  uint16_t prehook, posthook, final_callback;
};
Kinds kinds{};

class Run;

struct Entry {
  Run* run;
  uint32_t name, module;
  int64_t word, parameter;
  uint64_t sequence;
  std::atomic<int64_t> index;
  bool holds;
};

class Pre final : public torch::autograd::FunctionPreHook {
 public:
  explicit Pre(Entry* entry) : entry_(entry) {}
  variable_list operator()(const variable_list& grads) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}  // compiled autograd skips it
  static void operator delete(void*) {}  // it lies in its run's slots

 private:
  Entry* entry_;
};

class Post final : public torch::autograd::FunctionPostHook {
 public:
  explicit Post(Entry* entry) : entry_(entry) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
  static void operator delete(void*) {}

 private:
  Entry* entry_;
};

struct Slot {
  Entry entry;
  alignas(Pre) unsigned char pre[sizeof(Pre)];
  alignas(Post) unsigned char post[sizeof(Post)];
};

// Nodes that have been met, by open addressing: the walk asks once an edge.
class Seen {
 public:
  Seen() : table_(1024, nullptr) {}
  bool insert(const Node* node) {
    if (2 * size_ >= table_.size()) grow();
    if (!place(table_, node)) return false;
    ++size_;
    return true;
  }

 private:
  static bool place(std::vector<const Node*>& table, const Node* node) {
    const size_t mask = table.size() - 1;
    size_t at = (reinterpret_cast<uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15ull >> 20 & mask;
    while (table[at] != nullptr) {
      if (table[at] == node) return false;
      at = (at + 1) & mask;
    }
    table[at] = node;
    return true;
  }
  void grow() {
    std::vector<const Node*> larger(table_.size() * 4, nullptr);
    for (const Node* node : table_)
      if (node != nullptr) place(larger, node);
    table_.swap(larger);
  }
  std::vector<const Node*> table_;
  size_t size_ = 0;
};

int64_t count_words(const variable_list& tensors, int64_t parameter) {
  int64_t nones = 0;
  for (const auto& tensor : tensors) nones += !tensor.defined();
  return (int64_t(tensors.size()) - nones) | nones << 16 | parameter;
}

// One call of the engine: hooks on all nodes of its graph, and what the node that runs has received.
class Run {
 public:
  Run(std::shared_ptr<Writer> writer, int64_t number) : writer(std::move(writer)), number(number) {}

  std::shared_ptr<Writer> writer;
  const int64_t number;
  std::atomic<bool> live{true};
  bool truncated = false;

  size_t count() const { return nodes_.size(); }

  void walk(const std::vector<NodePtr>& roots) {
    Seen seen;
    for (const auto& root : roots)
      if (root && seen.insert(root.get())) nodes_.push_back(root);
    for (size_t at = 0; at < nodes_.size(); ++at) {
      for (const auto& edge : nodes_[at]->next_edges()) {
        if (edge.function && seen.insert(edge.function.get())) {
          if (nodes_.size() >= kMaxNodes) {
            truncated = true;
            return;
          }
          nodes_.push_back(edge.function);
        }
      }
    }
  }

  // ``seqs`` and ``modules``: where the modules' stretches of sequence numbers begin (record/modules.py).
  void hook(const py::list& seqs, const py::list& modules, const py::object& name_of, const py::object& of_parameter,
            bool holds) {
    slots_.reset(new Slot[nodes_.size()]);
    Stretch stretch;
    for (size_t at = 0; at < nodes_.size(); ++at) {
      Node& node = *nodes_[at];
      Entry& entry = slots_[at].entry;
      entry.run = this;
      entry.name = name(nodes_[at], name_of);
      entry.sequence = node.sequence_nr();
      entry.index.store(-1, std::memory_order_relaxed);
      entry.module = 0;
      entry.word = number;
      entry.parameter = 0;
      entry.holds = holds && entry.sequence != kNoSequence;
      if (entry.sequence != kNoSequence) {
        stretch.find(entry.sequence, seqs, modules);
        entry.module = stretch.module;
        entry.word = number | stretch.call << 32;
      } else if (auto* leaf = dynamic_cast<AccumulateGrad*>(&node)) {
        auto variable = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf->variable));
        auto words = of_parameter(variable).cast<std::pair<int64_t, uint32_t>>();
        entry.parameter = words.first << 32;
        entry.module = words.second;
      }
    }
    for (size_t at = 0; at < nodes_.size(); ++at) {
      if (slots_[at].entry.sequence != kNoSequence) continue;
      // Leaves are shared by threads: what these add later is not to move the list that the engine goes through.
      nodes_[at]->pre_hooks().reserve(kSpare);
      nodes_[at]->post_hooks().reserve(kSpare);
    }
    for (size_t at = 0; at < nodes_.size(); ++at) {  // nothing fails from here on
      Slot& slot = slots_[at];
      nodes_[at]->add_pre_hook(std::unique_ptr<torch::autograd::FunctionPreHook>(new (slot.pre) Pre(&slot.entry)));
      nodes_[at]->add_post_hook(std::unique_ptr<torch::autograd::FunctionPostHook>(new (slot.post) Post(&slot.entry)));
    }
    hooked_ = true;
  }

  void queue_final() {
    if (queued_.exchange(true)) return;
    auto to = writer;
    const int64_t seq = number;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [to, seq] { to->emit(kinds.final_callback, 0, 0, seq, 0, 0); });
  }

  int64_t next_index() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // A list that goes is let go outside of the lock: a tensor's end may need the interpreter.
  void opened(Entry* entry, const variable_list& grads) {
    variable_list held(grads);
    lock_.lock();
    open_ = entry;
    held.swap(grads_);
    lock_.unlock();
  }

  void closed() {
    variable_list held;
    lock_.lock();
    open_ = nullptr;
    held.swap(grads_);
    lock_.unlock();
  }

  // (index, name, module, word, parameter, sequence) of the node that runs, None where none does or is held.
  py::object open() {
    lock_.lock();
    Entry* entry = open_;
    lock_.unlock();
    if (entry == nullptr) return py::none();
    return py::make_tuple(entry->index.load(), entry->name, entry->module, entry->word, entry->parameter,
                          entry->sequence);
  }

  py::object grads() {
    variable_list held;
    lock_.lock();
    const bool there = open_ != nullptr;
    if (there) held = grads_;
    lock_.unlock();
    if (!there) return py::none();
    py::tuple found(held.size());
    for (size_t at = 0; at < held.size(); ++at)
      found[at] = held[at].defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(held[at])) : py::none();
    return found;
  }

  // Take the hooks out. Nodes are let go from the roots on, so that no chain of them is torn down recursively.
  void remove() {
    live.store(false);
    closed();
    if (hooked_) {
      hooked_ = false;
      for (size_t at = 0; at < nodes_.size(); ++at) {
        erase(nodes_[at]->pre_hooks(), slots_[at].pre);
        erase(nodes_[at]->post_hooks(), slots_[at].post);
      }
    }
    for (auto& node : nodes_) node.reset();
    nodes_.clear();
    slots_.reset();
  }

  // Ended; the hooks stay for now and do nothing.
  void pause() {
    live.store(false);
    closed();
  }

  // Another thread may still be within a node: the hooks stay where they are and do nothing from now on.
  void abandon() {
    live.store(false);
    closed();
    for (auto& node : nodes_) node.reset();
    nodes_.clear();
  }

 private:
  struct Stretch {
    uint64_t begin = 1, end = 0;
    uint32_t module = 0;
    int64_t call = 0;

    void find(uint64_t sequence, const py::list& seqs, const py::list& modules) {
      if (begin <= sequence && sequence < end) return;
      Py_ssize_t low = 0, high = PyList_GET_SIZE(seqs.ptr());
      const Py_ssize_t size = high;
      while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        if (at(seqs, middle) <= sequence)
          low = middle + 1;
        else
          high = middle;
      }
      begin = low > 0 ? at(seqs, low - 1) : 0;
      end = low < size ? at(seqs, low) : kNoSequence;
      module = 0;
      call = 0;
      if (low > 0) {
        PyObject* pair = PyList_GET_ITEM(modules.ptr(), low - 1);
        module = uint32_t(PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(pair, 0)));
        call = PyLong_AsLongLong(PyTuple_GET_ITEM(pair, 1));
      }
    }
    static uint64_t at(const py::list& seqs, Py_ssize_t index) {
      return PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(seqs.ptr(), index));
    }
  };

  template <class Hooks>
  static void erase(Hooks& hooks, const void* ours) {
    for (auto it = hooks.end(); it != hooks.begin();) {
      --it;
      if (static_cast<const void*>(it->get()) == ours) {
        hooks.erase(it);
        return;
      }
    }
  }

  // The id of a node's name; asked of Python once a class.
  uint32_t name(const NodePtr& node, const py::object& name_of) {
    Node& ref = *node;
    // By its name: torch does not export what a dynamic_cast to it needs.
    if (std::strcmp(typeid(ref).name(), "N5torch8autograd6PyNodeE") == 0) {
      auto object = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
      PyTypeObject* type = Py_TYPE(object.ptr());
      auto known = writer->python_names.find(type);
      if (known != writer->python_names.end()) return known->second.second;
      const auto id = name_of(py::str(ref.name()), object).cast<uint32_t>();
      auto kept = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
      writer->python_names.emplace(type, std::make_pair(kept, id));
      return id;
    }
    const std::type_index type(typeid(ref));
    const auto known = writer->names.find(type);
    if (known != writer->names.end()) return known->second;
    const auto id = name_of(py::str(ref.name()), py::none()).cast<uint32_t>();
    writer->names.emplace(type, id);
    return id;
  }

  std::vector<NodePtr> nodes_;
  std::unique_ptr<Slot[]> slots_;
  bool hooked_ = false;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> queued_{false};
  Spin lock_;
  Entry* open_ = nullptr;
  variable_list grads_;
};

variable_list Pre::operator()(const variable_list& grads) {
  Entry& entry = *entry_;
  Run& run = *entry.run;
  if (run.live.load(std::memory_order_relaxed)) {
    const int64_t index = run.next_index();
    entry.index.store(index, std::memory_order_relaxed);
    run.queue_final();
    if (entry.holds) run.opened(&entry, grads);
    run.writer->emit(kinds.prehook, entry.name, entry.module, index, entry.word, count_words(grads, entry.parameter));
  }
  return grads;
}

variable_list Post::operator()(const variable_list& outputs, const variable_list&) {
  Entry& entry = *entry_;
  Run& run = *entry.run;
  if (run.live.load(std::memory_order_relaxed)) {
    if (entry.holds) run.closed();
    run.writer->emit(kinds.posthook, entry.name, entry.module, entry.index.load(std::memory_order_relaxed), entry.word,
                     count_words(outputs, entry.parameter));
  }
  return outputs;
}

std::vector<std::shared_ptr<Run>>& abandoned() {
  static auto* found = new std::vector<std::shared_ptr<Run>>();  // never torn down: hooks refer to them
  return *found;
}

// Walk the graph below these tensors and hook its nodes. None where an output is no plain tensor: Python's hooks do it.
py::object begin(const std::shared_ptr<Writer>& writer, int64_t number, const py::sequence& outputs,
                 const py::list& seqs, const py::list& modules, const py::object& name_of,
                 const py::object& of_parameter, bool holds) {
  std::vector<NodePtr> roots;
  for (const auto& output : outputs) {
    if (!THPVariable_Check(output.ptr())) return py::none();
    const at::Tensor& tensor = THPVariable_Unpack(output.ptr());
    if (tensor.requires_grad()) roots.push_back(torch::autograd::impl::gradient_edge(tensor).function);
  }
  auto run = std::make_shared<Run>(writer, number);
  run->walk(roots);
  run->hook(seqs, modules, name_of, of_parameter, holds);
  return py::cast(run);
}

// ---- emit, for Python

PyObject* keywords[6];

int64_t word(PyObject* value) {
  int overflow = 0;
  const long long found = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow ? int64_t(PyLong_AsUnsignedLongLongMask(value)) : int64_t(found);
}

PyObject* emit(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  auto* writer = static_cast<std::shared_ptr<Writer>*>(PyCapsule_GetPointer(self, nullptr));
  int64_t words[6] = {0, 0, 0, 0, 0, 0};
  if (count > 6) {
    PyErr_SetString(PyExc_TypeError, "emit() takes six words");
    return nullptr;
  }
  for (Py_ssize_t at = 0; at < count; ++at) words[at] = word(args[at]);
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t at = 0; at < named; ++at) {
    PyObject* key = PyTuple_GET_ITEM(names, at);
    int found = 0;
    while (found < 6 && keywords[found] != key && PyUnicode_Compare(keywords[found], key) != 0) ++found;
    if (found == 6) {
      PyErr_Format(PyExc_TypeError, "emit() got an unexpected keyword argument %R", key);
      return nullptr;
    }
    words[found] = word(args[count + at]);
  }
  if (PyErr_Occurred() != nullptr) return nullptr;
  (*writer)->emit(uint16_t(words[0]), uint32_t(words[1]), uint32_t(words[2]), words[3], words[4], words[5]);
  Py_RETURN_NONE;
}

PyMethodDef emit_method = {"emit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&emit)),
                           METH_FASTCALL | METH_KEYWORDS, "Append one event; see schema.EventKind for the words."};

py::object emitter(const std::shared_ptr<Writer>& writer) {
  auto* kept = new std::shared_ptr<Writer>(writer);
  PyObject* capsule = PyCapsule_New(kept, nullptr, [](PyObject* self) {
    delete static_cast<std::shared_ptr<Writer>*>(PyCapsule_GetPointer(self, nullptr));
  });
  auto owned = py::reinterpret_steal<py::object>(capsule);
  return py::reinterpret_steal<py::object>(PyCFunction_NewEx(&emit_method, owned.ptr(), nullptr));
}

}  // namespace

PYBIND11_MODULE(DISTDBG_MODULE, m) {
  const char* names[6] = {"kind", "name", "module", "seq", "a", "b"};
  for (int at = 0; at < 6; ++at) keywords[at] = PyUnicode_InternFromString(names[at]);

  py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
      .def(py::init<const py::object&, int64_t>())
      .def("__call__", &Segment::take)
      .def_property_readonly("offset", &Segment::offset);
  py::class_<Writer, std::shared_ptr<Writer>>(m, "Writer")
      .def(py::init<py::object, py::object>())
      .def("set_segment", &Writer::set_segment, py::arg("segment").none(true))
      .def("set_step", &Writer::set_step)
      .def("emitter", &emitter);
  py::class_<Run, std::shared_ptr<Run>>(m, "Run")
      .def_readonly("number", &Run::number)
      .def_readonly("truncated", &Run::truncated)
      .def_property_readonly("count", &Run::count)
      .def("open", &Run::open)
      .def("grads", &Run::grads)
      .def("remove", &Run::remove)
      .def("pause", &Run::pause)
      .def("abandon", [](const std::shared_ptr<Run>& run) {
        run->abandon();
        abandoned().push_back(run);
      });
  m.def("begin", &begin);
  m.def("set_kinds", [](uint16_t prehook, uint16_t posthook, uint16_t final_callback) {
    kinds = Kinds{prehook, posthook, final_callback};
  });
}
