"""What two lines give: ``muon_for(model)`` on families of models, against other optimizers tuned."""
