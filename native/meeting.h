// Where threads of several processes wait for each other; a pass that needs it is given one.
#pragma once

namespace tokenmill {

struct Meeting {
  virtual ~Meeting() = default;
  // Returns when all have come; what each wrote before is then seen by all. False: one of them has not.
  virtual bool meet() = 0;
};

}  // namespace tokenmill
