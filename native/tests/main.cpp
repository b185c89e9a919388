#include <cstdio>

void walk_the_free_list();
void walk_the_pool();
void hold_copies_back();
void share_the_pool_between_threads();
void drop_a_pool_with_a_copy_held_back();
void share_a_loop();
void attend_as_in_double_precision();

int main() {
  walk_the_free_list();
  walk_the_pool();
  hold_copies_back();
  share_the_pool_between_threads();
  drop_a_pool_with_a_copy_held_back();
  share_a_loop();
  attend_as_in_double_precision();
  std::puts("ok");
  return 0;
}
